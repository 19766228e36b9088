"""sample_logits: one kernel for rows that fit one program; else the row's maximum, its pieces, and their merge."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Launch
from ._philox import gumbel_noise
from ._topk import fixed_sum, from_fixed, no_nan

WHOLE = 4096  # columns (the candidates of a centroid head) up to which a program takes a row, or more short rows
BLOCK = 2048  # columns a program of longer rows: 128 programs for one row of a Gemma 4 vocabulary
MAX_COLUMNS = 2**22
NO_ID = tl.constexpr(2**63 - 1)


def sample_logits(
    logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, *, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    launches, results = plan(logits, temperature, seed, offset, token_ids=token_ids)
    for launch in launches:
        launch.run()
    return results


def plan(
    logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, *, token_ids: Tensor | None = None
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """The launches and the results that they write."""
    rows, columns = logits.shape
    sampled_ids = logits.new_empty(rows, dtype=torch.int64)
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    args: dict[str, Any] = {
        "logits": logits, "logits_stride": logits.stride(0), "temperature": temperature, "seed": seed,
        "offset": offset, "temperature_stride": _stride(temperature), "seed_stride": _stride(seed),
        "offset_stride": _stride(offset), "token_ids": token_ids,
        "ids_stride": token_ids.stride(0) if token_ids is not None and token_ids.dim() == 2 else 0, "num_rows": rows,
    }
    block = triton.next_power_of_2(columns)
    if columns <= WHOLE:
        block_r = WHOLE // block
        constants = {"COLUMNS": columns, "NUM_PARTS": 1, "BLOCK_P": 1, "BLOCK_R": block_r, "BLOCK": block}
        outputs = {"part_max": None, "part_ids": sampled_ids, "part_values": logprobs, "part_noisy": None,
                   "part_sum": None}
        grid = (triton.cdiv(rows, block_r), 1)
        return [Launch(draw_kernel, grid, {**args, **outputs}, constants, num_warps=8)], (sampled_ids, logprobs)

    num_parts = triton.cdiv(columns, BLOCK)
    parts = {
        "part_max": logits.new_empty((rows, num_parts), dtype=torch.float32),
        "part_ids": logits.new_empty((rows, num_parts), dtype=torch.int64),
        "part_values": logits.new_empty((rows, num_parts), dtype=torch.float32),
        "part_noisy": logits.new_empty((rows, num_parts), dtype=torch.float32),
        "part_sum": logits.new_empty((rows, num_parts), dtype=torch.int64),
    }
    block_p = triton.next_power_of_2(num_parts)
    constants = {"COLUMNS": columns, "NUM_PARTS": num_parts, "BLOCK": BLOCK}
    maximum = Launch(max_kernel, (rows, num_parts), {"logits": logits, "logits_stride": logits.stride(0),
                                                     "part_max": parts["part_max"]}, constants)
    draw = Launch(draw_kernel, (rows, num_parts), {**args, **parts},
                  {**constants, "BLOCK_P": block_p, "BLOCK_R": 1}, num_warps=8)
    del parts["part_max"]
    merge = Launch(merge_kernel, (rows,), {**parts, "sampled_ids": sampled_ids, "logprobs": logprobs},
                   {"NUM_PARTS": num_parts, "BLOCK_P": block_p})
    return [maximum, draw, merge], (sampled_ids, logprobs)


def _stride(tensor: Tensor) -> int:
    """By row; 0 where one element serves all."""
    return 0 if tensor.size(0) == 1 else tensor.stride(0)


@triton.jit
def max_kernel(
    logits, logits_stride, part_max, COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs (a row, BLOCK columns): the largest logit; NaN counts as -inf."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * logits_stride + column, mask=column < COLUMNS, other=float("-inf"))
    tl.store(part_max + row * NUM_PARTS + tl.program_id(1), tl.max(no_nan(values.to(tl.float32)), 0))


@triton.jit(do_not_specialize=["temperature_stride", "seed_stride", "offset_stride", "num_rows"])
def draw_kernel(
    logits, logits_stride, temperature, seed, offset, temperature_stride, seed_stride, offset_stride, token_ids,
    ids_stride, part_max, part_ids, part_values, part_noisy, part_sum, num_rows, COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs (BLOCK_R rows, BLOCK columns): the draw, its scaled logit, and what a merge needs beside it.

    A logit counts as (logit - the row's largest) / temperature, as in the reference, so that the largest gives exactly
    0. With NUM_PARTS = 1 the program has whole rows: `part_ids` and `part_values` are the op's results.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(1)
    is_row = row < num_rows
    row = row.to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = is_row[:, None] & (column < COLUMNS)[None, :]
    values = tl.load(logits + row[:, None] * logits_stride + column[None, :], mask=mask, other=float("-inf"))
    values = no_nan(values.to(tl.float32))  # [BLOCK_R, BLOCK]
    if token_ids is not None:
        at = row[:, None] * ids_stride + column[None, :]
        ids = tl.load(token_ids + at, mask=mask, other=0).to(tl.int64)
    else:
        ids = column.to(tl.int64)[None, :] + tl.zeros([BLOCK_R, BLOCK], tl.int64)
    t = tl.load(temperature + row * temperature_stride, mask=is_row, other=1.0)[:, None]
    s = tl.load(seed + row * seed_stride, mask=is_row, other=0)[:, None]
    draw = tl.load(offset + row * offset_stride, mask=is_row, other=0)[:, None]
    if NUM_PARTS == 1:
        best = tl.max(values, 1)  # [BLOCK_R]
    else:
        p = tl.arange(0, BLOCK_P)
        p_mask = is_row[:, None] & (p < NUM_PARTS)[None, :]
        best = tl.max(tl.load(part_max + row[:, None] * NUM_PARTS + p[None, :], mask=p_mask, other=float("-inf")), 1)

    warm = t > 0.0  # False for NaN
    below = tl.where(values == best[:, None], 0.0, values - best[:, None])
    below = tl.where(values == float("-inf"), float("-inf"), below)
    scaled = tl.div_rn(below, tl.where(warm, t, 1.0) + tl.zeros([BLOCK_R, BLOCK], tl.float32))
    scaled = tl.where(below == float("-inf"), float("-inf"), scaled)
    noisy = scaled + tl.where(warm, gumbel_noise(s, draw, ids), 0.0)

    top = tl.max(noisy, 1)  # [BLOCK_R]
    at_top = (noisy == top[:, None]) & mask
    sampled = tl.min(tl.where(at_top, ids, NO_ID), 1)
    value = tl.max(tl.where(at_top & (ids == sampled[:, None]), scaled, float("-inf")), 1)
    total = fixed_sum(tl.exp(scaled), 1)
    result = row * NUM_PARTS + part
    tl.store(part_ids + result, sampled, mask=is_row)
    if NUM_PARTS == 1:
        tl.store(part_values + result, to_logprob(value, total), mask=is_row)
    else:
        tl.store(part_values + result, value, mask=is_row)
        tl.store(part_noisy + result, top, mask=is_row)
        tl.store(part_sum + result, total, mask=is_row)


@triton.jit
def merge_kernel(
    part_ids, part_values, part_noisy, part_sum, sampled_ids, logprobs, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr
):
    """A program a row."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    at, mask = row * NUM_PARTS + p, p < NUM_PARTS
    ids = tl.load(part_ids + at, mask=mask, other=NO_ID)
    values = tl.load(part_values + at, mask=mask, other=float("-inf"))
    noisy = tl.load(part_noisy + at, mask=mask, other=float("-inf"))
    sums = tl.load(part_sum + at, mask=mask, other=0)
    at_top = (noisy == tl.max(noisy, 0)) & mask
    sampled = tl.min(tl.where(at_top, ids, NO_ID), 0)
    value = tl.max(tl.where(at_top & (ids == sampled), values, float("-inf")), 0)
    tl.store(sampled_ids + row, sampled)
    tl.store(logprobs + row, to_logprob(value, tl.sum(sums, 0)))


@triton.jit
def to_logprob(value, total):
    """Of a scaled logit and the row's exponentials, summed in fixed point: 0 only where every logit is -inf."""
    logprob = tl.minimum(value - tl.log(from_fixed(tl.maximum(total, 1))), 0.0)
    return tl.where(value == float("-inf"), float("-inf"), logprob)
