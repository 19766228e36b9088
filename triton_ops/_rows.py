"""Rows of a tensor [..., columns] whose leading dimensions have any strides: on the host and in a kernel."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ROW_SIZES = ("size1", "size2")  # of these arguments a kernel must not specialise: the batch changes them


def num_rows(tensor: Tensor) -> int:
    """The product of the leading dimensions, 1 where there are none."""
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    return rows


def row_arguments(name: str, tensor: Tensor) -> dict[str, Any]:
    """`<name>_size1`, `_size2`, `_stride0` to `_stride2` of at most three leading dimensions, merged where possible.

    One level is enough for most tensors; the sizes are None then, and the kernel divides by nothing.
    """
    levels: list[tuple[int, int]] = []  # (size, stride), outermost first
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    assert len(levels) <= 3, "the op's `serves` refuses more leading dimensions"
    if len(levels) <= 1:
        values = (None, None, None, None, levels[0][1] if levels else tensor.size(-1))
    else:
        (_, stride0), (size1, stride1), (size2, stride2) = [(1, 0)] * (3 - len(levels)) + levels
        values = (size1, size2, stride0, stride1, stride2)
    return dict(zip((f"{name}_{part}" for part in (*ROW_SIZES, "stride0", "stride1", "stride2")), values))


@triton.jit
def row_offset(row, size1, size2, stride0, stride1, stride2):
    """Offset in elements, int64, of row `row` (int32) in the order of a contiguous tensor."""
    if size2 is None:
        offset = row.to(tl.int64) * stride2
    else:
        outer = row // size2
        offset = (row % size2).to(tl.int64) * stride2
        offset += (outer % size1).to(tl.int64) * stride1
        offset += (outer // size1).to(tl.int64) * stride0
    return offset
