"""What the tree kernels share: an order of scores, links between nodes, the rows of the target, padded paths."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


def row_strides(target: Tensor, num_nodes: int, trailing: int) -> dict[str, Any]:
    """Strides by which `row_offset` finds row r of target [T, ...] or [batch, N, ...], read flat."""
    flat = target.dim() == trailing + 1
    return {
        "stride_target_b": 0 if flat else target.stride(0),
        "stride_target_n": target.stride(0 if flat else 1),
        "rows_per_request": None if flat else num_nodes,
    }


@triton.jit
def row_offset(row, rows_per_request, stride_target_b, stride_target_n):
    """Elements in front of row `row` (int64) of the target's tensor."""
    if rows_per_request is None:
        return row * stride_target_n
    else:
        return row // rows_per_request * stride_target_b + row % rows_per_request * stride_target_n


@triton.jit
def has_row(row, num_rows):
    return (row >= 0) & (row < num_rows)


@triton.jit
def load_link(links, node, num_nodes):
    """The node (int32) that the link of `node` leads to, -1 where it is not in 1..num_nodes - 1 or `node` is -1."""
    there = node >= 0
    link = tl.load(links + node, mask=there, other=-1).to(tl.int64)
    return tl.where((link > 0) & (link < num_nodes), link, -1).to(tl.int32)


@triton.jit
def fill_behind(values, count, width, BLOCK: tl.constexpr):
    """values[count:width] = -1."""
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(values + place, tl.full([BLOCK], -1, tl.int64), mask=(place >= count) & (place < width))


@triton.jit
def no_nan(scores):
    """NaN becomes -inf."""
    return tl.where(scores != scores, float("-inf"), scores)


@triton.jit
def ordered(scores):
    """fp32 scores as uint32 in the same order; NaN is -inf, -0.0 is 0.0, and nothing maps to 0."""
    scores = no_nan(scores)
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -(2**31)).to(tl.uint32, bitcast=True)
