"""lm_head_topk: a pass over the weight with running lists, then a merge; more passes where k is larger than a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._attention_math import decode_fp8, tanh
from ._early import let_others_start, wait_for_others
from ._fp8_words import GROUP, has_words, split_words, spread
from ._launch import Launch, capability
from ._prefetch import prefetch
from ._rows import num_rows, row_arguments, row_offset
from ._topk import (
    NO_ORDER,
    exact_sum,
    finite_or_zero,
    is_suppressed,
    merge_launch,
    new_parts,
    new_results,
    no_nan,
    pack,
    pop,
    precedes,
    push,
    suppress_arguments,
)

LANES = 64  # rows of the weight that a step multiplies: the least that Hopper's matrix instruction takes
MAX_DEPTH = 8  # candidates that a lane keeps in registers
MAX_STATE_OF_4_WARPS = 300  # words a lane; 288 (16 rows, k = 8) takes 199 registers a thread on sm_90, 352 takes 253
MAX_STATE = 720  # of 8 warps: 704 (64 rows, k = 4) is the most that sm_90 takes without spilling
MAX_STATE_OF_FP8 = 640  # of 8 warps: 704 spills, since the tile of the weight takes registers too
MAX_STATE_AHEAD = 240  # of 4 warps, and twice that of 8: 224 (32 rows, k = 2) takes 227 registers, 288 spills
NUM_PROGRAMS = 256  # two a multiprocessor, 8 of them one: 262144 rows make 1024 for each, and all end together


@dataclass(frozen=True)
class HeadConfig:
    """The shape of one program's loop. No choice here changes a bit of the results."""

    block_m: int  # rows of normed
    halves: int  # times LANES rows of the weight share a load of normed
    block_k: int
    num_warps: int
    num_stages: int
    ahead: bool = False  # the scales of the next rows of the weight wait in registers


def head_config(rows: int, depth: int, mapped: bool, itemsize: int, weight_itemsize: int) -> HeadConfig:
    """16 KiB of weight a stage, or 8, at most 99 KiB of shared memory (sm_120).

    Lists, sums and products stay in registers: they decide the warps, and how many rows share a load of the weight.
    Microseconds of 262144 x 1024 in fp8 on an H200, k = 1, batch 1 / 8: in one half with 6 stages 70.1 / 70.9, with 8
    72.1 / 72.5; in two halves with 5 73.4 / 73.3; tiles of 64 columns 106 / 106. Batch 32, in two halves 79.3, in one
    82.8, with 8 warps 96.9.
    """
    fp8 = weight_itemsize == 1
    for block_m in (64, 32, 16):
        halves = 1 if block_m == 16 or itemsize == 4 else 2
        state = block_m * ((3 if mapped else 2) * depth + 1 + halves)  # words that a lane holds
        if block_m == 16 or (rows > block_m // 2 and state <= (MAX_STATE_OF_FP8 if fp8 else MAX_STATE)):
            break
    num_warps = 8 if state > MAX_STATE_OF_4_WARPS else 4
    if itemsize == 4:
        return HeadConfig(block_m, halves, 32, num_warps, 2)
    if fp8:
        ahead = state <= MAX_STATE_AHEAD * num_warps // 4
        return HeadConfig(block_m, halves, 128, num_warps, {16: 6, 32: 4, 64: 3}[block_m], ahead)
    return HeadConfig(block_m, halves, 128 if halves == 1 else 64, num_warps, 4)


def lm_head_topk(
    normed: Tensor,
    weight: Tensor,
    k: int,
    *,
    weight_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    vocab_start: int = 0,
    logits_soft_cap: float = 0.0,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    launches, results = plan(normed, weight, k, weight_scale=weight_scale, token_map=token_map, vocab_start=vocab_start,
                             logits_soft_cap=logits_soft_cap, suppress_ids=suppress_ids)
    for launch in launches:
        launch.run()
    return results


def plan(
    normed: Tensor,
    weight: Tensor,
    k: int,
    *,
    weight_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    vocab_start: int = 0,
    logits_soft_cap: float = 0.0,
    suppress_ids: Tensor | None = None,
    native_fp8: bool | None = None,
    early: bool | None = None,
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    """The launches and the results that they write.

    native_fp8: whether the device converts fp8; early: whether what follows the first launch may start before those in
    front of it have ended; None asks the device.
    """
    early = capability(normed.device) >= 90 if early is None else early
    rows, vocab = num_rows(normed), weight.size(0)
    depth = min(k, MAX_DEPTH)
    config = head_config(rows, depth, token_map is not None, normed.element_size(), weight.element_size())
    step = 2 * LANES
    rows_per_part = triton.cdiv(triton.cdiv(vocab, NUM_PROGRAMS), step) * step
    parts = new_parts(normed, rows, triton.cdiv(vocab, rows_per_part), depth)
    results = new_results(normed, k)
    ranked = _ranked(normed, rows, k) if k > depth else {"best_values": None, "best_orders": None}
    decode = weight.element_size() == 1 and not (_converts_fp8(weight) if native_fp8 is None else native_fp8)

    launches, suppressed = _suppress(normed, vocab, suppress_ids, token_map, vocab_start)
    x, x_scale, words = normed, None, has_words(normed, weight)
    if words:
        launch, x, x_scale = spread(normed)
        launches.append(launch)
        weight = weight.view(torch.int16)
    elif decode:
        weight = weight.view(torch.uint8)
    waits = early and words  # the stream has a launch in front of it
    for done in range(0, k, depth):
        args: dict[str, Any] = {
            "normed": x, **row_arguments("normed", x), "normed_scale": x_scale, "weight": weight,
            "weight_stride": weight.stride(0), "weight_scale": weight_scale, "token_map": token_map,
            "logits_soft_cap": float(logits_soft_cap), "suppressed": suppressed, **parts,
            "best_values": ranked["best_values"] if done else None,
            "best_orders": ranked["best_orders"] if done else None, "num_rows": rows, "done": done,
        }
        constants = {
            "VOCAB": vocab, "HIDDEN": normed.size(-1), "K": k, "DEPTH": depth, "ROWS_PER_PART": rows_per_part,
            "NUM_PARTS": parts["part_max"].size(1), "CAPPED": logits_soft_cap > 0, "WORDS": words, "DECODE": decode,
            "LANES": LANES, "HALVES": config.halves, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k,
            "STAGES": config.num_stages, "AHEAD": weight_scale is not None and config.ahead, "PACKED": False,
            "EARLY": waits, "PREFETCH": False,
        }
        grid = (triton.cdiv(rows, config.block_m), constants["NUM_PARTS"])
        launches.append(Launch(stream_kernel, grid, args, constants, config.num_warps, config.num_stages,
                               early=waits))
        launches.append(merge_launch(parts, results, min(depth, k - done), done=done, ranked=ranked,
                                     token_map=token_map, vocab_start=vocab_start, early=early))
    return launches, (results["logprobs"], results["token_ids"], results["logsumexp"])


def _ranked(normed: Tensor, rows: int, k: int) -> dict[str, Tensor | None]:
    return {
        "best_values": normed.new_empty((rows, k), dtype=torch.float32),
        "best_orders": normed.new_empty((rows, k), dtype=torch.int64),
    }


def _suppress(
    normed: Tensor, vocab: int, suppress_ids: Tensor | None, token_map: Tensor | None, vocab_start: int
) -> tuple[list[Launch], Tensor | None]:
    """Marks the rows of suppressed tokens once, in a launch of its own: the loop of stream_kernel has no registers left
    for the list, and a loop inside it would keep its loads from being pipelined."""
    listed, num_suppressed = suppress_arguments(suppress_ids)
    if listed is None:
        return [], None
    marks = normed.new_empty(vocab, dtype=torch.uint8)
    args = {"suppress_ids": listed, "token_map": token_map, "vocab_start": vocab_start, "marks": marks}
    constants = {"VOCAB": vocab, "NUM_SUPPRESSED": num_suppressed, "BLOCK_V": 1024}
    return [Launch(mark_kernel, (triton.cdiv(vocab, 1024),), args, constants)], marks


def _converts_fp8(weight: Tensor) -> bool:
    return capability(weight.device) >= 89


@triton.jit(do_not_specialize=["normed_size1", "normed_size2", "num_rows", "done"])
def stream_kernel(
    normed, normed_size1, normed_size2, normed_stride0, normed_stride1, normed_stride2, normed_scale, weight,
    weight_stride, weight_scale, token_map, suppressed, logits_soft_cap, part_values, part_orders, part_max, part_sum,
    best_values, best_orders, num_rows, done, VOCAB: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr,
    DEPTH: tl.constexpr, ROWS_PER_PART: tl.constexpr, NUM_PARTS: tl.constexpr, CAPPED: tl.constexpr,
    WORDS: tl.constexpr, DECODE: tl.constexpr, LANES: tl.constexpr, HALVES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
    PREFETCH: tl.constexpr
):
    """Programs (BLOCK_M rows of normed, a part of the vocabulary): the best DEPTH candidates, and max and sum of exp.

    Each of LANES lanes keeps the best DEPTH of the weight rows that it meets, and their sum, so that the loop only has
    elementwise work beside the product; the lanes meet at the end. Steps over hidden and over the vocabulary are one
    loop: the pipeline of loads never drains. From the second pass on (`best_values`), only candidates behind the last
    one of the pass before count, and the sums are there already. PACKED: orders have the token id in their upper half,
    as with a token_map. PREFETCH: L2 is asked for a part's first rows. WORDS: see _fp8_words.py, which lays out normed.
    """
    let_others_start(EARLY)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    normed_rows = normed + row_offset(m, normed_size1, normed_size2, normed_stride0, normed_stride1, normed_stride2)
    part = tl.program_id(1)
    lane = tl.arange(0, LANES)
    STEPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    BLOCK_V: tl.constexpr = HALVES * LANES
    EVEN_K: tl.constexpr = HIDDEN % BLOCK_K == 0
    COLUMNS: tl.constexpr = HIDDEN // 2 if WORDS else HIDDEN  # of the weight
    X_COLUMNS: tl.constexpr = (HIDDEN + GROUP - 1) // GROUP * GROUP if WORDS else HIDDEN
    PAST: tl.constexpr = best_values is not None
    nothing = tl.full([1, 1], NO_ORDER if token_map is not None else 2**31 - 1, tl.int64)
    if token_map is None:
        nothing = nothing.to(tl.int32)
    if PREFETCH:
        first, half = (part * ROWS_PER_PART + lane)[:, None], tl.arange(0, 2)[None, :]  # a thread has half a row
        rows = weight + tl.minimum(first, VOCAB - 1).to(tl.int64) * weight_stride + half * (COLUMNS // 2)
        BYTES: tl.constexpr = COLUMNS // 2 * (weight.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(rows.to(tl.int64), first < VOCAB, BYTES)
    wait_for_others(EARLY)
    last_value = tl.zeros([BLOCK_M], tl.float32)
    last_order = tl.zeros([BLOCK_M], tl.int64)
    if PAST:
        last = m.to(tl.int64) * K + done - 1
        last_value = tl.load(best_values + last, mask=m_mask, other=0.0)
        last_order = tl.load(best_orders + last, mask=m_mask, other=0)

    values = ()
    orders = ()
    for _ in tl.static_range(DEPTH):
        values += (tl.full([LANES, BLOCK_M], float("-inf"), tl.float32),)
        orders += (tl.zeros([LANES, BLOCK_M], nothing.dtype) + nothing,)
    sums = tl.zeros([LANES, BLOCK_M], tl.float32)
    acc0 = tl.zeros([LANES, BLOCK_M], tl.float32)
    acc1 = tl.zeros([LANES, BLOCK_M], tl.float32)
    scale0 = None
    scale1 = None
    if AHEAD:  # memory is far away, and the lists wait for the scales
        scale0 = load_scale(weight_scale, part * ROWS_PER_PART + lane, VOCAB)
        scale1 = load_scale(weight_scale, part * ROWS_PER_PART + LANES + lane, VOCAB)

    for step in tl.range(0, ROWS_PER_PART // BLOCK_V * STEPS, num_stages=STAGES):
        v = part * ROWS_PER_PART + step // STEPS * BLOCK_V + lane  # [LANES]
        k = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        if WORDS:  # 0 from the branch below instead, and ptxas would wait after each instruction of a product
            acc0 = tl.where(step % STEPS == 0, 0.0, acc0)
            if HALVES == 2:
                acc1 = tl.where(step % STEPS == 0, 0.0, acc1)
        x_mask = m_mask[None, :] if EVEN_K else m_mask[None, :] & (k < X_COLUMNS)[:, None]
        x = tl.load(normed_rows[None, :] + k[:, None], mask=x_mask, other=0.0)  # [BLOCK_K, BLOCK_M]
        if WORDS:
            k = step % STEPS * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        w = load_weight(weight, weight_stride, v, k, VOCAB, COLUMNS, EVEN_K, WORDS, DECODE, x.dtype)
        acc0 = tl.dot(w, x, acc0, input_precision="ieee")  # [LANES, BLOCK_M]
        if HALVES == 2:
            w1 = load_weight(weight, weight_stride, v + LANES, k, VOCAB, COLUMNS, EVEN_K, WORDS, DECODE, x.dtype)
            acc1 = tl.dot(w1, x, acc1, input_precision="ieee")
        if step % STEPS == STEPS - 1:
            logits = scaled(acc0, v, m, scale0, weight_scale, normed_scale, num_rows, VOCAB)
            values, orders, sums = rank(
                logits, v, values, orders, sums, nothing, token_map, suppressed, logits_soft_cap, last_value,
                last_order, VOCAB, DEPTH, CAPPED, PAST
            )
            if AHEAD:
                scale0 = load_scale(weight_scale, v + BLOCK_V, VOCAB)
            if not WORDS:
                acc0 = tl.zeros([LANES, BLOCK_M], tl.float32)
            if HALVES == 2:
                logits = scaled(acc1, v + LANES, m, scale1, weight_scale, normed_scale, num_rows, VOCAB)
                values, orders, sums = rank(
                    logits, v + LANES, values, orders, sums, nothing, token_map, suppressed, logits_soft_cap,
                    last_value, last_order, VOCAB, DEPTH, CAPPED, PAST
                )
                if AHEAD:
                    scale1 = load_scale(weight_scale, v + BLOCK_V + LANES, VOCAB)
                if not WORDS:
                    acc1 = tl.zeros([LANES, BLOCK_M], tl.float32)

    at = m.to(tl.int64) * NUM_PARTS + part  # [BLOCK_M]
    if not PAST:
        top = tl.max(values[0], 0)  # [BLOCK_M]
        total = exact_sum(sums * tl.exp(values[0] - finite_or_zero(top)[None, :]), 0)
        tl.store(part_max + at, top, mask=m_mask)
        tl.store(part_sum + at, total, mask=m_mask)
    for d in range(DEPTH):
        best = tl.max(values[0], 0)
        order = tl.min(tl.where(values[0] == best[None, :], orders[0], nothing), 0)
        tl.store(part_values + at * DEPTH + d, best, mask=m_mask)
        absent = order == 2**31 - 1 if token_map is None else order == NO_ORDER
        place = pack(order, order) if PACKED else order.to(tl.int64)
        tl.store(part_orders + at * DEPTH + d, tl.where(absent, NO_ORDER, place), mask=m_mask)
        values, orders = pop(orders[0] == order[None, :], values, orders, nothing, DEPTH)


@triton.jit(do_not_specialize=["vocab_start"])
def mark_kernel(
    suppress_ids, token_map, vocab_start, marks, VOCAB: tl.constexpr, NUM_SUPPRESSED: tl.constexpr,
    BLOCK_V: tl.constexpr
):
    """Programs (BLOCK_V rows of the weight): 1 for each that names a suppressed token, 0 for the others."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    if token_map is not None:
        token_ids = tl.load(token_map + v, mask=v < VOCAB, other=0).to(tl.int64)
    else:
        token_ids = v.to(tl.int64) + vocab_start
    found = is_suppressed(token_ids, suppress_ids, NUM_SUPPRESSED)
    tl.store(marks + v, found.to(tl.uint8), mask=v < VOCAB)


@triton.jit
def load_weight(
    weight, weight_stride, v, k, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, EVEN_K: tl.constexpr, WORDS: tl.constexpr,
    DECODE: tl.constexpr, dtype: tl.constexpr
):
    """Rows v and columns k of the weight (WORDS: of its words), in the dtype of normed: [LANES, BLOCK_K]."""
    mask = (v < VOCAB)[:, None]
    if not EVEN_K:
        mask = mask & (k < COLUMNS)[None, :]
    at = weight + v.to(tl.int64)[:, None] * weight_stride + k[None, :]
    if WORDS:
        w = split_words(tl.load(at, mask=mask, other=0), DECODE)
    elif DECODE:
        w = decode_fp8(tl.load(at, mask=mask, other=0), dtype)
    else:
        w = tl.load(at, mask=mask, other=0.0).to(dtype)
    return w


@triton.jit
def load_scale(weight_scale, v, VOCAB: tl.constexpr):
    """The scales of rows v of the weight [LANES]."""
    return tl.load(weight_scale + v, mask=v < VOCAB, other=0.0)


@triton.jit
def scaled(products, v, m, scale, weight_scale, normed_scale, num_rows, VOCAB: tl.constexpr):
    """The logits [LANES, BLOCK_M] of rows v of the weight and m of normed; `scale`: of rows v, None to load it."""
    if normed_scale is not None:  # in L1 after the first time: there are no registers to keep it
        products = products * tl.load(normed_scale + m, mask=m < num_rows, other=0.0)[None, :]
    if scale is not None:
        products = products * scale[:, None]
    elif weight_scale is not None:
        products = products * load_scale(weight_scale, v, VOCAB)[:, None]
    return products


@triton.jit
def rank(
    logits, v, values, orders, sums, nothing, token_map, suppressed, logits_soft_cap, last_value, last_order,
    VOCAB: tl.constexpr, DEPTH: tl.constexpr, CAPPED: tl.constexpr, PAST: tl.constexpr
):
    """Cap the logits [LANES, BLOCK_M] of rows v of the weight, add them to the lists and to the sums."""
    is_row = v < VOCAB
    if CAPPED:
        logits = logits_soft_cap * tanh(logits / logits_soft_cap)
    counts = is_row
    if suppressed is not None:
        counts = tl.load(suppressed + v, mask=is_row, other=1) == 0
    value = tl.where(counts[:, None], no_nan(logits), float("-inf"))
    order = pack(tl.load(token_map + v, mask=is_row, other=0), v) if token_map is not None else v
    order = tl.where(is_row[:, None], order[:, None], nothing) + tl.zeros(logits.shape, nothing.dtype)
    if PAST:
        left = precedes(last_value[None, :], last_order[None, :], value, order.to(tl.int64))
        value, order = tl.where(left, value, float("-inf")), tl.where(left, order, nothing)
    else:
        before = values[0]
        top = finite_or_zero(tl.maximum(before, value))
        sums = sums * tl.exp(before - top) + tl.exp(value - top)
    values, orders = push(value, order, values, orders, DEPTH)
    return values, orders, sums
