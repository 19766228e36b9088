"""commit: what a round emits, and the seed of the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.commit import commit as reference
from ._checks import (
    check_device,
    check_float,
    check_index,
    check_last_contiguous,
    check_rank,
    check_shape,
    require,
    show_shape,
)
from ._contents import check_contents, check_contents_range
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "commit"
MAX_WIDTH = 1024  # columns of accept_ids, of the Triton kernel, whose program holds all of them at once
SCHEMA = """commit(Tensor accept_index, Tensor num_accepted, Tensor accept_ids, Tensor target_hidden, *,
    Tensor? stop_ids=None) -> (Tensor output_ids, Tensor num_output, Tensor finished, Tensor seed_ids,
    Tensor seed_state)"""


def commit(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cut the accepted tokens and the bonus after the first stop id, and fetch the seed of the next round.

    A request has num_accepted + 1 tokens (clamped to 1..max_depth + 1). The first of them that is in stop_ids ends the
    request: it is kept, what follows is not. Negative ids never match, so a list of stop ids may be padded with -1.
    The seed is the last token kept, with the target's hidden at the row that predicted it: that of its parent, which
    stands at the same place of accept_index. The row is clamped to the rows there are.

    Args:
        accept_index: [batch, max_depth + 1] int32 or int64, of `verify_greedy` or `verify_sample`.
        num_accepted: [batch] int32 or int64, accepted draft tokens.
        accept_ids: [batch, max_depth + 1] int32 or int64, accepted tokens and the bonus.
        target_hidden: [T, backbone] bf16, fp16 or fp32, T >= 1 unless batch is 0: the target's hidden after its final
            norm, at every row that it verified.
        stop_ids: [num_stops] int32 or int64, or None.

    Returns:
        output_ids [batch, max_depth + 1] int64, the tokens to emit, -1 behind them; num_output [batch] int64, how many
        they are, at least 1; finished [batch] bool, whether the last one is a stop id; seed_ids [batch] int64;
        seed_state [batch, backbone], dtype of target_hidden.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device.

    >>> accept_index, accept_ids = torch.tensor([[0, 2, 4, -1]]), torch.tensor([[8, 4, 9, -1]])
    >>> target_hidden = torch.tensor([[0.0], [0.1], [0.2], [0.3], [0.4]])
    >>> commit(accept_index, torch.tensor([2]), accept_ids, target_hidden)[:3]
    (tensor([[ 8,  4,  9, -1]]), tensor([3]), tensor([False]))
    >>> commit(accept_index, torch.tensor([2]), accept_ids, target_hidden, stop_ids=torch.tensor([3, 4]))
    (tensor([[ 8,  4, -1, -1]]), tensor([2]), tensor([True]), tensor([4]), tensor([[0.2000]]))
    """
    return torch.ops.mtp.commit(accept_index, num_accepted, accept_ids, target_hidden, stop_ids=stop_ids)


def check(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> None:
    check_rank(NAME, "accept_index", accept_index, 2)
    check_index(NAME, "accept_index", accept_index)
    batch, width = accept_index.shape
    why = f"accept_index is {show_shape(accept_index.shape)}"
    require(width >= 1, NAME, "accept_index", "at least 1 column", width)
    check_shape(NAME, "num_accepted", num_accepted, (batch,), why)
    check_index(NAME, "num_accepted", num_accepted)
    check_shape(NAME, "accept_ids", accept_ids, (batch, width), why)
    check_index(NAME, "accept_ids", accept_ids)
    check_rank(NAME, "target_hidden", target_hidden, 2)
    check_float(NAME, "target_hidden", target_hidden)
    if batch > 0:
        require(target_hidden.size(0) >= 1, NAME, "target_hidden", "at least 1 row", 0, why)
    if stop_ids is not None:
        check_rank(NAME, "stop_ids", stop_ids, 1)
        check_index(NAME, "stop_ids", stop_ids)
    others = {
        "num_accepted": num_accepted,
        "accept_ids": accept_ids,
        "target_hidden": target_hidden,
        "stop_ids": stop_ids,
    }
    check_last_contiguous(NAME, accept_index=accept_index, **others)
    check_device(NAME, accept_index.device, "accept_index", **others)


def outputs(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> tuple[Spec, ...]:
    batch = accept_index.size(0)
    counts = ((batch,), torch.int64)
    state = ((batch, target_hidden.size(1)), target_hidden.dtype)
    return (accept_index.shape, torch.int64), counts, ((batch,), torch.bool), counts, state


def contents(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> None:
    width, num_rows = accept_index.size(1), target_hidden.size(0)
    check_contents_range(NAME, "num_accepted", num_accepted, 0, width - 1, f"accept_ids has {width} columns")
    used = torch.arange(width, device=accept_index.device) <= num_accepted.unsqueeze(1)
    rows = f"target_hidden has {num_rows} rows"
    check_contents_range(NAME, "accept_index", accept_index, 0, num_rows - 1, rows, used)
    check_contents(NAME, "accept_ids", accept_ids, (accept_ids < 0) & used, "a token id of at least 0")
    read = torch.zeros(num_rows, 1, dtype=torch.bool, device=accept_index.device)
    read[accept_index[used].long()] = True
    check_contents(NAME, "target_hidden", target_hidden, ~torch.isfinite(target_hidden) & read, "a finite value")


def serves(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> str:
    """Why the Triton kernel does not take these arguments; "" if it does."""
    width = accept_index.size(1)
    return "" if width <= MAX_WIDTH else f"accept_index has {width} columns: at most {MAX_WIDTH}"


register(
    SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
    kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)),
)
