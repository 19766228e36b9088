"""What the tests of the heads share: exactly representable inputs, a ranking by plain sorting, sizes of temporaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from harness import _meta, assert_same_bits, call, forced, random_tensor, results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_kernels.ops import OPS

INDICES = [torch.int32, torch.int64]


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """-3 to 3: every product and sum is exact in any order, so logits are exact, and they tie often."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype=dtype, device=device)


def sort_row(logits: Sequence[float], ids: Sequence[int], k: int) -> tuple[list[float], list[int], float]:
    """logprobs, ids and logsumexp of one row's k best, by sorting Python numbers: (logit descending, id ascending)."""
    clean = [-math.inf if math.isnan(x) else float(x) for x in logits]
    top = max(clean)
    total = top if math.isinf(top) else top + math.log(math.fsum(math.exp(x - top) for x in clean))
    best = sorted(zip(clean, ids), key=lambda pair: (-pair[0], pair[1]))[:k]
    return [-math.inf if math.isinf(total) else x - total for x, _ in best], [i for _, i in best], total


Row = tuple[Sequence[float], Sequence[int]]


def assert_topk(got: tuple[Tensor, Tensor, Tensor], rows: Sequence[Row], k: int) -> None:
    """The ids are exactly those of sorted (logits, ids) of each row; logprobs and logsumexp agree to fp32 rounding."""
    logprobs, ids, total = got
    expected = [sort_row(logits, row_ids, k) for logits, row_ids in rows]
    assert ids.reshape(-1, k).tolist() == [e[1] for e in expected]
    close = {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(logprobs.reshape(-1, k).cpu(), torch.tensor([e[0] for e in expected]), **close)
    torch.testing.assert_close(total.reshape(-1).cpu(), torch.tensor([e[2] for e in expected]), **close)
    assert (logprobs <= 0).all()


def assert_ids_near(got: Tensor, exact: Tensor, exact_logits: Tensor, tolerance: float) -> None:
    """Ids are distinct and agree, but where the fp64 logits [..., vocab] of both choices lie within the tolerance."""
    assert got.sort(-1).values.diff(dim=-1).ne(0).all()
    apart = (exact_logits.gather(-1, got) - exact_logits.gather(-1, exact)).abs()
    assert (apart <= tolerance).all(), f"{apart.max().item():.3e} apart"


class LargestFp32(TorchDispatchMode):
    """Notes the number of elements of the largest fp32 (or wider) tensor that the block makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor) and made.is_floating_point() and made.element_size() >= 4:
                self.numel = max(self.numel, made.untyped_storage().nbytes() // made.element_size())
        return out


def check_reads_nothing(op: str, *args: Any, **kwargs: Any) -> None:
    """The reference works on tensors without contents: it makes no host copy and no shape depends on data."""
    real = results(OPS[op].reference(*args, **kwargs))
    meta = results(OPS[op].reference(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()}))
    assert [(m.shape, m.dtype) for m in meta] == [(r.shape, r.dtype) for r in real]


def check_rows_alone(op: str, implementation: str, normed: Tensor, *args: Any, **kwargs: Any) -> None:
    """A row's result does not depend on the number, the order or the values of the rows beside it.

    From a kernel the same bits; from the reference almost, since PyTorch's products depend on their shape.
    """
    n = normed.size(0)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(7)).to(normed.device)
    with forced(implementation):
        whole = results(call(op, normed, *args, **kwargs))
        others = [(order, call(op, normed[order], *args, **kwargs))]
        for rows in ([0], [n - 1], list(range(n // 2, n - 1))):
            index = torch.tensor(rows, device=normed.device)
            others.append((index, call(op, normed[index], *args, **kwargs)))
    for index, other in others:
        for one, two in zip(whole, results(other)):
            if implementation == "reference":
                torch.testing.assert_close(two, one[index], rtol=1e-5, atol=1e-5)
            else:
                assert_same_bits(two, one[index])


def check_threads(op: str, implementation: str, *args: Any, **kwargs: Any) -> None:
    """One thread and two give the same bits."""
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with forced(implementation):
                made.append(results(call(op, *args, **kwargs)))
    finally:
        torch.set_num_threads(2)  # as conftest.py has it
    for one, two in zip(*made):
        assert_same_bits(one, two)


def exact_on_cpu(device: str) -> Any:
    """What makes inputs for check_rows_alone: the products of Triton's interpreter depend on their shape, too."""
    return random_tensor if device == "cuda" else integers
