"""sample_logits: one draw a row, repeatable from a seed and an offset."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.sample_logits import sample_logits as reference
from ._checks import (
    check_device,
    check_dtype,
    check_float,
    check_index,
    check_last_contiguous,
    check_rank,
    fail,
    require,
    show_shape,
)
from ._contents import check_contents
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "sample_logits"
SCHEMA = """sample_logits(Tensor logits, Tensor temperature, Tensor seed, Tensor offset, *,
    Tensor? token_ids=None) -> (Tensor sampled_ids, Tensor logprobs)"""


def sample_logits(
    logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, *, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One draw a row from softmax(logits / temperature), by the Gumbel-max rule.

    The draw is argmax(logits / temperature + noise), and the noise of a token depends on (seed, offset, token id)
    alone (Philox-4x32-10; `mtp_kernels/reference/_philox.py` says how the three are laid out): never on the row's or
    the column's place, on the batch, or on the device. So a request draws the same whatever it is batched with, its
    columns may come in any order, and rows that must draw independently need different offsets or seeds.

    A row with temperature <= 0 or NaN takes its argmax, and its logprob at temperature 1. With temperature +inf every
    logit above -inf is equally likely. NaN logits count as -inf, which is never drawn; a row with nothing else gives
    its lowest id with logprob -inf. Beside a logit of +inf nothing finite is drawn. The lowest token id wins a tie.

    Args:
        logits: [n, m], m >= 1, bf16, fp16 or fp32.
        temperature: [n] or [1] fp32.
        seed: [n] or [1] int64, any value.
        offset: [n] or [1] int64, any value: the number of the draw, to be advanced by whoever draws.
        token_ids: [m] or [n, m] int32 or int64, the token id of each column; None for 0 to m - 1. An id should stand
            once in a row.

    Returns:
        sampled_ids [n] int64 and logprobs [n] fp32, log_softmax(logits / temperature) of the drawn token.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    >>> seed, offset = torch.tensor([7]), torch.tensor([0, 1])
    >>> ids, logprobs = sample_logits(logits, torch.tensor([1.0, 0.0]), seed, offset)
    >>> int(ids[1]), torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], ids])
    (2, True)
    """
    return torch.ops.mtp.sample_logits(logits, temperature, seed, offset, token_ids=token_ids)


def check(
    logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, *, token_ids: Tensor | None = None
) -> None:
    check_rank(NAME, "logits", logits, 2)
    check_float(NAME, "logits", logits)
    rows, columns = logits.shape
    require(columns > 0, NAME, "logits", "at least 1 column", columns)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("seed", seed, torch.int64),
        ("offset", offset, torch.int64),
    ):
        if tensor.dim() != 1 or tensor.size(0) not in (rows, 1):
            fail(NAME, name, f"[{rows}] or [1]", show_shape(tensor.shape), f"logits has {rows} rows")
        check_dtype(NAME, name, tensor, (dtype,))
    if token_ids is not None:
        if tuple(token_ids.shape) not in ((columns,), (rows, columns)):
            expected = f"[{columns}] or [{rows}, {columns}]"
            fail(NAME, "token_ids", expected, show_shape(token_ids.shape), f"logits is [{rows}, {columns}]")
        check_index(NAME, "token_ids", token_ids)
    check_last_contiguous(
        NAME, logits=logits, temperature=temperature, seed=seed, offset=offset, token_ids=token_ids
    )
    check_device(
        NAME, logits.device, "logits", temperature=temperature, seed=seed, offset=offset, token_ids=token_ids
    )


def outputs(
    logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, *, token_ids: Tensor | None = None
) -> tuple[Spec, ...]:
    return ((logits.size(0),), torch.int64), ((logits.size(0),), torch.float32)


def contents(
    logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, *, token_ids: Tensor | None = None
) -> None:
    bad = logits.isnan() | (logits == torch.inf)  # -inf is how a caller forbids a token
    check_contents(NAME, "logits", logits, bad, "a finite value or -inf")
    check_contents(NAME, "temperature", temperature, temperature.isnan(), "a number")
    if token_ids is not None:
        check_contents(NAME, "token_ids", token_ids, token_ids < 0, "a token id of at least 0")


def serves(logits: Tensor, *args: object, **options: object) -> str:
    """Why the Triton kernels do not serve these arguments, or ""."""
    return f"logits has {logits.size(1)} columns, more than 2^22" if logits.size(1) > 2**22 else ""


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)))
