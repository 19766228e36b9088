"""What the heads share: an exact order of candidates, sums that have no order, and the merge of partial results.

A candidate is a value (fp32, NaN taken as -inf) and an `order`: a distinct integer that ascends with the token id, so
that the lower order wins a tie. An order of 64 bits is pack(token id, row or place).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._early import wait_for_others
from ._launch import Launch

NO_ORDER = tl.constexpr(2**63 - 1)  # behind every candidate
UNITS = tl.constexpr(2.0**40)  # of a fixed-point sum


def merge_launch(
    parts: dict[str, Tensor], results: dict[str, Tensor], take: int, *, done: int = 0, ranked: dict[str, Tensor | None],
    token_map: Tensor | None = None, vocab_start: int = 0, packed: bool = False, early: bool = False
) -> Launch:
    """Merges the partial lists and sums of every row into entries done to done + take of its results.

    `ranked` (`best_values` and `best_orders`, or None twice) gets the candidates behind the results.
    """
    rows, num_parts, depth = parts["part_values"].shape
    logprobs = results["logprobs"]
    args: dict[str, Any] = {**parts, **results, **ranked, "token_map": token_map, "vocab_start": vocab_start,
                            "done": done}
    constants = {
        "NUM_PARTS": num_parts, "DEPTH": depth, "K": logprobs.size(-1), "TAKE": take, "FIRST": done == 0,
        "PACKED": packed, "BLOCK_P": triton.next_power_of_2(num_parts),
        "BLOCK_E": triton.next_power_of_2(num_parts * depth), "EARLY": early,
    }
    warps = 4 if num_parts * depth <= 2048 else 8
    return Launch(merge_kernel, (rows,), args, constants, num_warps=warps, early=early)


def suppress_arguments(suppress_ids: Tensor | None) -> tuple[Tensor | None, int]:
    """The list for a kernel, and its length; an empty one is none."""
    if suppress_ids is None or suppress_ids.size(0) == 0:
        return None, 0
    return suppress_ids, suppress_ids.size(0)


def new_parts(like: Tensor, rows: int, num_parts: int, depth: int) -> dict[str, Tensor]:
    """The workspace between a kernel that makes partial results and the merge."""
    return {
        "part_values": like.new_empty((rows, num_parts, depth), dtype=torch.float32),
        "part_orders": like.new_empty((rows, num_parts, depth), dtype=torch.int64),
        "part_max": like.new_empty((rows, num_parts), dtype=torch.float32),
        "part_sum": like.new_empty((rows, num_parts), dtype=torch.float32),
    }


def new_results(normed: Tensor, k: int) -> dict[str, Tensor]:
    leading = normed.shape[:-1]
    return {
        "logprobs": normed.new_empty((*leading, k), dtype=torch.float32),
        "token_ids": normed.new_empty((*leading, k), dtype=torch.int64),
        "logsumexp": normed.new_empty(leading, dtype=torch.float32),
    }


@triton.jit
def no_nan(values):
    """NaN becomes -inf, everything else stays."""
    return tl.where(values != values, float("-inf"), values)


@triton.jit
def precedes(value, order, other_value, other_order):
    return (value > other_value) | ((value == other_value) & (order < other_order))


@triton.jit
def pack(token_id, place):
    """An order by token id, then place. Ids beyond 32 bits are level with each other; `place` finds the id again."""
    high = tl.minimum(tl.maximum(token_id.to(tl.int64), -(2**31)), 2**31 - 1)
    return (high << 32) | place.to(tl.int64)


@triton.jit
def is_suppressed(token_ids, suppress_ids, NUM_SUPPRESSED: tl.constexpr):
    """Which of token_ids are among the NUM_SUPPRESSED ids of the list."""
    found = token_ids != token_ids
    for i in range(NUM_SUPPRESSED):
        found = found | (token_ids == tl.load(suppress_ids + i))
    return found


@triton.jit
def finite_or_zero(largest):
    """What to subtract before exp: -inf is no number to subtract from -inf."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def exact_sum(values, axis: tl.constexpr):
    """Sum of fp32 values in [0, 2^22) in fixed point: the same bits in whatever order threads add them."""
    return from_fixed(fixed_sum(values, axis))


@triton.jit
def fixed_sum(values, axis: tl.constexpr):
    return tl.sum((values * UNITS).to(tl.int64), axis)


@triton.jit
def from_fixed(total):
    return total.to(tl.float32) * (1.0 / UNITS)


@triton.jit
def to_logprob(value, total):
    """-inf stays -inf; +inf is certain, and everything finite beside it is impossible."""
    logprob = tl.minimum(value - total, 0.0)
    logprob = tl.where(value == float("inf"), 0.0, logprob)
    return tl.where(value == float("-inf"), float("-inf"), logprob)


@triton.jit
def push(value, order, values, orders, DEPTH: tl.constexpr):
    """Insert a tensor of candidates into DEPTH tensors that hold, element by element, the best so far in order."""
    new_values = ()
    new_orders = ()
    for d in tl.static_range(DEPTH):
        first = precedes(value, order, values[d], orders[d])
        new_values += (tl.where(first, value, values[d]),)
        new_orders += (tl.where(first, order, orders[d]),)
        value, order = tl.where(first, values[d], value), tl.where(first, orders[d], order)
    return new_values, new_orders


@triton.jit
def pop(taken, values, orders, nothing, DEPTH: tl.constexpr):
    """Drop the best candidate of the elements in `taken`; the rest of their lists moves up."""
    new_values = ()
    new_orders = ()
    for d in tl.static_range(DEPTH):
        if d + 1 < DEPTH:
            new_values += (tl.where(taken, values[d + 1], values[d]),)
            new_orders += (tl.where(taken, orders[d + 1], orders[d]),)
        else:
            new_values += (tl.where(taken, float("-inf"), values[d]),)
            new_orders += (tl.where(taken, nothing, orders[d]),)
    return new_values, new_orders


@triton.jit(do_not_specialize=["vocab_start", "done"])
def merge_kernel(
    part_values, part_orders, part_max, part_sum, logprobs, token_ids, logsumexp, best_values, best_orders, token_map,
    vocab_start, done, NUM_PARTS: tl.constexpr, DEPTH: tl.constexpr, K: tl.constexpr, TAKE: tl.constexpr,
    FIRST: tl.constexpr, PACKED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr
):
    """A program a row: the sum of its parts' exponentials, then TAKE times the best candidate that is left."""
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK_E)
    is_entry = entry < NUM_PARTS * DEPTH
    values = tl.load(part_values + row * (NUM_PARTS * DEPTH) + entry, mask=is_entry, other=float("-inf"))
    orders = tl.load(part_orders + row * (NUM_PARTS * DEPTH) + entry, mask=is_entry, other=NO_ORDER)
    if FIRST:
        part = tl.arange(0, BLOCK_P)
        largest = tl.load(part_max + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=float("-inf"))
        sums = tl.load(part_sum + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=0.0)
        top = tl.max(largest, 0)
        total = top + tl.log(exact_sum(sums * tl.exp(largest - finite_or_zero(top)), 0))
        total = tl.where(tl.abs(top) == float("inf"), top, total)
        tl.store(logsumexp + row, total)
    else:
        total = tl.load(logsumexp + row)

    result = row * K + done
    for j in range(TAKE):
        value = tl.max(values, 0)
        order = tl.min(tl.where(values == value, orders, NO_ORDER), 0)
        if token_map is not None:
            token_id = tl.load(token_map + (order & 0xFFFFFFFF), mask=order != NO_ORDER, other=0).to(tl.int64)
        elif PACKED:
            token_id = order >> 32
        else:
            token_id = order + vocab_start
        tl.store(logprobs + result + j, to_logprob(value, total))
        tl.store(token_ids + result + j, token_id)
        if best_values is not None:
            tl.store(best_values + result + j, value)
            tl.store(best_orders + result + j, order)
        values = tl.where(orders == order, float("-inf"), values)
        orders = tl.where(orders == order, NO_ORDER, orders)
