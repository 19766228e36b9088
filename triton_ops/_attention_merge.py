"""The second kernel of draft_attention: the merge of what the programs of the first left (_attention_kernels.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from ._attention_kernels import average, average_factor, chunk_size, fold, load_scale, locate
from ._early import let_others_start, wait_for_others
from ._wide_gemm import halvings


@triton.jit
def after_all(values, zero):
    """The same values, the first of which needs all to be there: else the compiler loads each where it is used.

    `zero` is 0, which the compiler may not know.
    """
    bits = values[0].to(tl.int32, bitcast=True)
    every = bits
    for i in tl.static_range(1, len(values)):
        every |= values[i].to(tl.int32, bitcast=True)
    return ((bits | (every & zero)).to(tl.float32, bitcast=True),) + values[1:]  # noqa: RUF005 - Triton has no *


@triton.jit
def fold_in(top, total, y, new_top, new_total, new_y):
    """Two parts folded: maxima and sums [...], averages [..., elements] or [elements]."""
    top, total, shrink, new_shrink = fold(top, total, new_top, new_total)
    if len(shrink.shape) == 1:
        shrink, new_shrink = shrink[:, None], new_shrink[:, None]
    return top, total, tl.fma(y, shrink, new_y * new_shrink)


@triton.jit
def load_parts(stats_ptr, partial_ptr, at, parts, first, live_parts, COUNT: tl.constexpr, d,
               HEAD_DIM: tl.constexpr):
    """COUNT parts from `first` on, a tuple each of maxima, sums and averages: no key's behind `live_parts`.

    All loads are on their way before the first is waited for.
    """
    tops, totals, ys = (), (), ()
    for j in tl.static_range(COUNT):
        part = first + j
        place = at.to(tl.int64) * parts + part
        tops += (tl.load(stats_ptr + place * 2, mask=part < live_parts, other=float("-inf")),)
        totals += (tl.load(stats_ptr + place * 2 + 1, mask=part < live_parts, other=0.0),)
        if len(part.shape) == 1:
            y_at, y_live = (partial_ptr + place * HEAD_DIM)[:, None] + d[None, :], (part < live_parts)[:, None]
        else:
            y_at, y_live = partial_ptr + place * HEAD_DIM + d, part < live_parts
        ys += (tl.load(y_at, mask=y_live, other=0.0),)
    return after_all(tops, parts >> 30), totals, after_all(ys, parts >> 30)


@triton.jit
def fold_in_order(tops, totals, ys, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT parts of the tuples, from FIRST on."""
    top, total, y = tops[FIRST], totals[FIRST], ys[FIRST]
    for j in tl.static_range(FIRST + 1, FIRST + COUNT):
        top, total, y = fold_in(top, total, y, tops[j], totals[j], ys[j])
    return top, total, y


@triton.jit
def fold_pairs(tops, totals, ys):
    """Of tuples: neighbours."""
    half_tops, half_totals, half_ys = (), (), ()
    for i in tl.static_range(0, len(tops), 2):
        top, total, y = fold_in(tops[i], totals[i], ys[i], tops[i + 1], totals[i + 1], ys[i + 1])
        half_tops, half_totals, half_ys = half_tops + (top,), half_totals + (total,), half_ys + (y,)  # noqa: RUF005
    return half_tops, half_totals, half_ys


@triton.jit
def neighbours(x):
    """A tile's rows, the first of each two and the second."""
    HALF: tl.constexpr = x.shape[0] // 2
    if len(x.shape) == 1:
        pairs = tl.reshape(x, [HALF, 2])
    else:
        pairs = tl.reshape(x, [HALF, 2, x.shape[1]])
        pairs = tl.permute(pairs, [0, 2, 1])
    return tl.split(pairs)


@triton.jit(do_not_specialize=["table_stride", "table_size", "page_size", "bound", "max_chunks", "parts", "per_request",
                               "group", "v_scale_stride"],
            do_not_specialize_on_alignment=["seq_lens_ptr", "kv_indptr_ptr", "table_ptr"])
def merge(
    partial_ptr, stats_ptr, out_ptr, table_ptr, seq_lens_ptr, kv_indptr_ptr, v_scale_ptr, table_stride, table_size,
    page_size, bound, max_chunks, chunk_weight, parts, per_request, num_qo_heads, group, v_scale_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MULTIPLE: tl.constexpr, FOLD: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):
    """Grid (batch * rows * num_qo_heads, head_dim / BLOCK_D).

    A fold's parts are folded in order. Of each 16 folds neighbours are folded, then of what is left likewise; these,
    again, in order. Folds that do not exist change nothing, so GROUP is 16 or what a row can have at most. They lie
    side by side in a tile [GROUP, BLOCK_D], or, WIDE, AHEAD at a time in each thread. Where a part has two folds
    already, FOLD counts the chunks of both, and GROUP is 8 at most.
    """
    let_others_start(EARLY)
    EACH: tl.constexpr = FOLD // CHUNKS  # parts of a fold
    at = tl.program_id(0)
    _, _, visible = locate(table_ptr, seq_lens_ptr, kv_indptr_ptr, table_stride, table_size, page_size, bound,
                           at // per_request)
    keys = chunk_size(visible, max_chunks, chunk_weight, MULTIPLE)
    v_scale = load_scale(v_scale_ptr, at % num_qo_heads // group, v_scale_stride)
    live_parts = tl.cdiv(tl.cdiv(visible, keys), CHUNKS)
    wait_for_others(EARLY)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    all_top, all_total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    all_y = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, live_parts, GROUP * EACH):
        if WIDE:
            tops, totals, ys = (), (), ()
            for i in tl.static_range(GROUP // AHEAD):
                part_tops, part_totals, part_ys = load_parts(
                    stats_ptr, partial_ptr, at, parts, first + i * AHEAD * EACH, live_parts, AHEAD * EACH, d,
                    HEAD_DIM)
                for k in tl.static_range(AHEAD):
                    top, total, y = fold_in_order(part_tops, part_totals, part_ys, k * EACH, EACH)
                    tops, totals, ys = tops + (top,), totals + (total,), ys + (y,)  # noqa: RUF005
            for _level in tl.static_range(halvings(GROUP)):
                tops, totals, ys = fold_pairs(tops, totals, ys)
            top, total, y = tops[0], totals[0], ys[0]
        else:
            part_tops, part_totals, part_ys = load_parts(
                stats_ptr, partial_ptr, at, parts, first + tl.arange(0, GROUP) * EACH, live_parts, EACH, d, HEAD_DIM)
            # [GROUP], [GROUP], [GROUP, BLOCK_D]
            top, total, y = fold_in_order(part_tops, part_totals, part_ys, 0, EACH)
            for _level in tl.static_range(halvings(GROUP)):
                one_top, two_top = neighbours(top)
                one_total, two_total = neighbours(total)
                one_y, two_y = neighbours(y)
                top, total, y = fold_in(one_top, one_total, one_y, two_top, two_total, two_y)
            top, total, y = tl.sum(top, 0), tl.sum(total, 0), tl.sum(y, 0)  # of one row
        all_top, all_total, all_y = fold_in(all_top, all_total, all_y, top, total, y)
    all_y = average(all_y + 0.0, average_factor(all_total, visible, v_scale), visible)
    tl.store(out_ptr + at.to(tl.int64) * HEAD_DIM + d, all_y.to(out_ptr.dtype.element_ty))
