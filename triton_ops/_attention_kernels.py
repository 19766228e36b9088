"""Kernels of draft_attention: chunks of keys, or folds of chunks, one or more a program; then the merge of these parts.

A draft has few queries and many keys. Scores are [keys, queries] and the average is [head_dim, queries], so that the
few queries are the short side of a tensor core's tile (8), and K and V are read as they lie. Each warp multiplies its
own slab of K's columns. Tiles of K and V come by asynchronous copies, whose rows the page table gives one tile earlier
still. A query is a row of the request and a head of the group that shares the KV head: a tree's frontier reads each key
once.

A chunk is the unit of arithmetic: its running maximum, its sum, and its average, not divided by the sum yet, start from
nothing. FOLD consecutive chunks are folded in order, and the folds then likewise. One request alone needs a program for
each chunk; where there are many, a program runs folds of chunks, and leaves that much less to write and to merge.
The kernels give the same bits in all ways: what they share leaves the compiler no choice of what to round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._attention_math import decode_fp8, sincos, tanh
from ._early import let_others_start, wait_for_others
from ._prefetch import prefetch

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(table_ptr, seq_lens_ptr, kv_indptr_ptr, table_stride, table_size, page_size, bound, b):
    """Where the table of request b starts, its first visible key, and how many are visible: at most `bound`.

    `table_size` is the width of a [batch, max_pages] table, or the length of a flat one.
    """
    if kv_indptr_ptr is None:
        table = table_ptr + b.to(tl.int64) * table_stride
        capacity = table_size.to(tl.int64) * page_size
    else:
        begin = tl.load(kv_indptr_ptr + b).to(tl.int64)
        end = tl.load(kv_indptr_ptr + b + 1).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), table_size)
        table = table_ptr + begin
        capacity = tl.maximum(tl.minimum(end, table_size) - begin, 0) * page_size
    length = tl.load(seq_lens_ptr + b).to(tl.int64)
    length = tl.minimum(tl.minimum(tl.maximum(length, 0), capacity), 0x7FFFFFFF).to(tl.int32)
    visible = tl.minimum(length, bound)
    return table, length - visible, visible


@triton.jit
def chunk_size(visible, max_chunks, chunk_weight, BLOCK_N: tl.constexpr):
    """Keys a chunk, a multiple of BLOCK_N, from the visible keys alone: no batch and no table may change a result.

    It grows with the square root of them: a few keys read by many programs where there is little to read, and few
    partial results where there is much.
    """
    keys = tl.ceil(tl.sqrt_rn(visible.to(tl.float32) * chunk_weight)).to(tl.int32)
    keys = tl.maximum(tl.maximum(keys, tl.cdiv(visible, max_chunks)), 1)
    return tl.cdiv(keys, BLOCK_N) * BLOCK_N


@triton.jit
def fold(top, total, new_top, new_total):
    """The maximum and sum of a chunk folded into those before it, and the factors of the averages of both.

    -inf, 0, 0 are the maximum, sum and average of no key at all.
    """
    best = tl.maximum(top, new_top)
    base = tl.where(best == float("-inf"), 0.0, best)
    shrink, new_shrink = tl.exp2(top - base), tl.exp2(new_top - base)
    return best, tl.fma(total, shrink, new_total * new_shrink), shrink, new_shrink


@triton.jit
def find_pages(table, key, end, page_size, num_pages, LOG2_PAGE: tl.constexpr):
    """The page of each key before `end`, as int64 within the cache. No other entry of the table is read."""
    entry = key // page_size if LOG2_PAGE < 0 else key >> LOG2_PAGE
    page = tl.load(table + entry, mask=key < end, other=0)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)


@triton.jit
def load_queries(q_ptr, norm_ptr, freq_ptr, positions_ptr, q_stride_row, q_stride_head, position_stride, row, rows,
                 num_pairs, group, eps, HALF: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                 BLOCK_GROUP: tl.constexpr, EARLY: tl.constexpr):
    """Both halves of the normed and turned queries, each [BLOCK_ROWS * BLOCK_GROUP, head_dim / 2], in dtype of q.

    RoPE pairs an element with that half a head away: with the halves apart, nothing has to be shuffled.
    """
    g = tl.arange(0, BLOCK_GROUP)
    i = tl.arange(0, HALF)
    live = (row < rows)[:, None] & (g < group)[None, :]  # [rows, group]
    at = q_ptr + row.to(tl.int64)[:, None] * q_stride_row + g.to(tl.int64)[None, :] * q_stride_head
    at = at[:, :, None] + i[None, None, :]
    if norm_ptr is not None:
        norm_one = tl.load(norm_ptr + i).to(tl.float32)[None, None, :]
        norm_two = tl.load(norm_ptr + HALF + i).to(tl.float32)[None, None, :]
    if freq_ptr is not None:
        position = tl.load(positions_ptr + row * position_stride, mask=row < rows, other=0).to(tl.float32)
        freq = tl.load(freq_ptr + i, mask=i < num_pairs, other=0.0)  # the others do not turn
        sine, cosine = sincos(position[:, None] * freq[None, :])  # [rows, head_dim / 2]
        sine, cosine = sine[:, None, :], cosine[:, None, :]
    wait_for_others(EARLY)  # for q alone: table, lengths and positions stay as they are in a round
    one = tl.load(at, mask=live[:, :, None], other=0.0).to(tl.float32)  # [rows, group, head_dim / 2]
    two = tl.load(at + HALF, mask=live[:, :, None], other=0.0).to(tl.float32)
    if norm_ptr is not None:
        mean = (tl.sum(product(one, one), 2) + tl.sum(product(two, two), 2)) / (2 * HALF)
        factor = (1.0 / tl.sqrt_rn(mean + eps))[:, :, None]
        one = one * factor * norm_one
        two = two * factor * norm_two
    if freq_ptr is not None:
        one, two = tl.fma(one, cosine, -(two * sine)), tl.fma(two, cosine, one * sine)
    dtype = q_ptr.dtype.element_ty
    one = tl.reshape(one.to(dtype), (BLOCK_ROWS * BLOCK_GROUP, HALF))
    two = tl.reshape(two.to(dtype), (BLOCK_ROWS * BLOCK_GROUP, HALF))
    return one, two


@triton.jit
def product(x, y):
    """x * y, rounded before anything is added to it."""
    return tl.fma(x, y, 0.0)


@triton.jit
def load_scale(scale_ptr, head, scale_stride):
    return 1.0 if scale_ptr is None else tl.load(scale_ptr + head * scale_stride)


@triton.jit
def load_cache(at, mask, dtype: tl.constexpr):
    """A tile of K or V in the dtype of q; zeros, not what lies there, where no key is visible."""
    if at.dtype.element_ty == tl.uint8:
        return decode_fp8(tl.load(at, mask=mask, other=0), dtype)
    return tl.load(at, mask=mask, other=0.0).to(dtype)


@triton.jit
def load_tile(k_head, v_head, table, key, end, page_size, num_pages, k_stride_page, k_stride_slot, v_stride_page,
              v_stride_slot, HALF: tl.constexpr, SLABS: tl.constexpr, LOG2_PAGE: tl.constexpr, dtype: tl.constexpr):
    """Halves of K [slabs, keys, columns of a slab] and of V [head_dim / 2, keys], and which keys are seen."""
    SLAB: tl.constexpr = HALF // SLABS
    i = tl.arange(0, HALF)
    column = tl.arange(0, SLABS)[:, None, None] * SLAB + tl.arange(0, SLAB)[None, None, :]  # [slabs, 1, columns]
    seen = key < end
    page = find_pages(table, key, end, page_size, num_pages, LOG2_PAGE)
    slot = (key % page_size if LOG2_PAGE < 0 else key & ((1 << LOG2_PAGE) - 1)).to(tl.int64)
    k_at = k_head + (page * k_stride_page + slot * k_stride_slot)[None, :, None] + column
    # The addresses are turned, not the tile: that would take it out of the asynchronous copies.
    v_at = tl.trans(v_head + (page * v_stride_page + slot * v_stride_slot)[:, None] + i[None, :])
    k_seen, v_seen = seen[None, :, None], tl.trans(seen[:, None])
    k_one = load_cache(k_at, k_seen, dtype)
    k_two = load_cache(k_at + HALF, k_seen, dtype)
    return k_one, k_two, load_cache(v_at, v_seen, dtype), load_cache(v_at + HALF, v_seen, dtype), seen


@triton.jit
def prefetch_keys(k_head, v_head, table, begin, end, page_size, num_pages, k_stride_page, k_stride_slot, v_stride_page,
                  v_stride_slot, HEAD_DIM: tl.constexpr, LOG2_PAGE: tl.constexpr):
    """Asks L2 for K and V of the first 64 keys from `begin` on, of which there is one at least."""
    BYTES: tl.constexpr = HEAD_DIM * (k_head.dtype.element_ty.primitive_bitwidth // 8)
    key = begin + tl.arange(0, 64)
    page = find_pages(table, key, end, page_size, num_pages, LOG2_PAGE)
    slot = (key % page_size if LOG2_PAGE < 0 else key & ((1 << LOG2_PAGE) - 1)).to(tl.int64)
    k_at = (k_head + page * k_stride_page + slot * k_stride_slot).to(tl.int64)[:, None]
    v_at = (v_head + page * v_stride_page + slot * v_stride_slot).to(tl.int64)[:, None]
    is_value = (tl.arange(0, 2) == 1)[None, :]  # K or V of a key a thread
    prefetch(tl.where(is_value, v_at, k_at), (key < end)[:, None] & (is_value | True), BYTES)


@triton.jit
def attend_tile(k_one, k_two, v_one, v_two, seen, q_one, q_two, top, total, y_one, y_two, scale, logits_soft_cap,
                SOFT_CAP: tl.constexpr, dtype: tl.constexpr):
    """Maximum, sum and average with the keys of a tile."""
    s = tl.dot(k_one, q_one, input_precision="ieee")  # [slabs, keys, queries]
    s = tl.dot(k_two, q_two, s, input_precision="ieee")
    s = tl.sum(s, 0) * scale  # [keys, queries]
    if SOFT_CAP:
        s = logits_soft_cap * LOG2_E * tanh(s / logits_soft_cap)
    s = tl.where(seen[:, None], s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 0))
    p = tl.exp2(s - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    total = tl.fma(total, shrink, tl.sum(p, 0))
    p = p.to(dtype)  # [keys, queries]
    y_one = tl.dot(v_one, p, y_one * shrink[None, :], input_precision="ieee")
    y_two = tl.dot(v_two, p, y_two * shrink[None, :], input_precision="ieee")
    return new_top, total, y_one, y_two


@triton.jit(do_not_specialize=["num_pages", "page_size", "bound", "max_chunks", "parts", "run", "rows",
                               "num_kv_heads", "group", "num_pairs", "table_size", "table_stride",
                               "position_stride_batch", "position_stride", "k_scale_stride", "v_scale_stride"],
            do_not_specialize_on_alignment=["seq_lens_ptr", "kv_indptr_ptr", "table_ptr", "positions_ptr"])
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, kv_indptr_ptr, k_scale_ptr, v_scale_ptr, norm_ptr, freq_ptr,
    positions_ptr,
    partial_ptr,  # [batch * rows * num_qo_heads, parts, head_dim] fp32; the result itself where one part is all
    stats_ptr,  # [batch * rows * num_qo_heads, parts, 2] fp32: the maximum of the scores, base 2, and the sum
    q_stride_batch, q_stride_row, q_stride_head,
    k_stride_page, k_stride_slot, k_stride_head,
    v_stride_page, v_stride_slot, v_stride_head,
    table_stride, table_size, position_stride_batch, position_stride, k_scale_stride, v_scale_stride,
    num_pages, page_size, bound, max_chunks, chunk_weight, parts, run, rows, num_kv_heads, group, num_pairs, sm_scale,
    logits_soft_cap, eps,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    SLABS: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr, LOG2_PAGE: tl.constexpr, SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr, ONE_TILE: tl.constexpr, EARLY: tl.constexpr, PREFETCH: tl.constexpr,
):
    """Grid (batch * num_kv_heads * row blocks, parts over `run`). A part is CHUNKS chunks; one loop over all tiles.

    RUNS: whether `run`, the parts of a program, is more than 1.
    ONE_TILE: a part is a chunk that never has more than BLOCK_N keys; then these are on their way before the queries
    are waited for. The cache is the target's, which no kernel of a round writes. PREFETCH: L2 is asked for the first of
    a part's keys.
    """
    let_others_start(EARLY)
    HALF: tl.constexpr = HEAD_DIM // 2
    SLAB: tl.constexpr = HALF // SLABS
    BLOCK_M: tl.constexpr = BLOCK_ROWS * BLOCK_GROUP
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    row_block, head = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks % num_kv_heads
    b = tl.program_id(0) // (row_blocks * num_kv_heads)
    part = tl.program_id(1) * run

    table, first, visible = locate(table_ptr, seq_lens_ptr, kv_indptr_ptr, table_stride, table_size, page_size, bound,
                                   b)
    keys = chunk_size(visible, max_chunks, chunk_weight, BLOCK_N)
    # In 64 bits: a part that does not exist may begin behind 2^31.
    span = keys.to(tl.int64) * CHUNKS
    begin = part * span
    span *= run
    if stats_ptr is not None and begin >= visible:
        wait_for_others(EARLY)  # a kernel that ends before those in front of it would let the next one run too soon
        return
    end = first + tl.minimum(begin + span, visible).to(tl.int32)
    begin = first + begin.to(tl.int32)

    n = tl.arange(0, BLOCK_N)
    k_head, v_head = k_ptr + head.to(tl.int64) * k_stride_head, v_ptr + head.to(tl.int64) * v_stride_head
    if PREFETCH and begin < end:
        prefetch_keys(k_head, v_head, table, begin, end, page_size, num_pages, k_stride_page, k_stride_slot,
                      v_stride_page, v_stride_slot, HEAD_DIM, LOG2_PAGE)
    if ONE_TILE:
        k_one, k_two, v_one, v_two, seen = load_tile(
            k_head, v_head, table, begin + n, end, page_size, num_pages, k_stride_page, k_stride_slot, v_stride_page,
            v_stride_slot, HALF, SLABS, LOG2_PAGE, dtype)

    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    q_at = q_ptr + b.to(tl.int64) * q_stride_batch + (head * group).to(tl.int64) * q_stride_head
    q_one, q_two = load_queries(
        q_at, norm_ptr, freq_ptr, positions_ptr + b * position_stride_batch if freq_ptr is not None else None,
        q_stride_row, q_stride_head, position_stride, row, rows, num_pairs, group, eps, HALF, BLOCK_ROWS, BLOCK_GROUP,
        EARLY)
    q_one = tl.reshape(tl.trans(q_one), (SLABS, SLAB, BLOCK_M))
    q_two = tl.reshape(tl.trans(q_two), (SLABS, SLAB, BLOCK_M))
    scale = sm_scale * load_scale(k_scale_ptr, head, k_scale_stride)
    if not SOFT_CAP:
        scale = scale * LOG2_E

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y_one = tl.zeros([HALF, BLOCK_M], tl.float32)  # [head_dim / 2, queries]
    y_two = tl.zeros([HALF, BLOCK_M], tl.float32)
    SEVERAL: tl.constexpr = CHUNKS > 1 or RUNS
    if SEVERAL:
        chunk_end = begin + keys
    if CHUNKS > 1:
        all_top, all_total, all_one, all_two = top, total, y_one, y_two
        part_end = begin + keys * CHUNKS
    if ONE_TILE:
        top, total, y_one, y_two = attend_tile(
            k_one, k_two, v_one, v_two, seen, q_one, q_two, top, total, y_one, y_two, scale, logits_soft_cap, SOFT_CAP,
            dtype)
    for start in tl.range(begin, end if not ONE_TILE else begin, BLOCK_N, num_stages=STAGES):
        k_one, k_two, v_one, v_two, seen = load_tile(
            k_head, v_head, table, start + n, end, page_size, num_pages, k_stride_page, k_stride_slot, v_stride_page,
            v_stride_slot, HALF, SLABS, LOG2_PAGE, dtype)
        top, total, y_one, y_two = attend_tile(
            k_one, k_two, v_one, v_two, seen, q_one, q_two, top, total, y_one, y_two, scale, logits_soft_cap, SOFT_CAP,
            dtype)
        if SEVERAL and start + BLOCK_N >= tl.minimum(chunk_end, end):
            if CHUNKS > 1:
                all_top, all_total, shrink, new_shrink = fold(all_top, all_total, top, total)
                all_one = tl.fma(all_one, shrink[None, :], y_one * new_shrink[None, :])
                all_two = tl.fma(all_two, shrink[None, :], y_two * new_shrink[None, :])
            elif RUNS:
                leave(partial_ptr, stats_ptr, b, head, row_block, part, parts, rows, num_kv_heads, group, top, total,
                      y_one, y_two, BLOCK_ROWS, BLOCK_GROUP)
                part += 1
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            y_one = tl.zeros([HALF, BLOCK_M], tl.float32)
            y_two = tl.zeros([HALF, BLOCK_M], tl.float32)
            chunk_end += keys
            if CHUNKS > 1 and RUNS and start + BLOCK_N >= tl.minimum(part_end, end):
                leave(partial_ptr, stats_ptr, b, head, row_block, part, parts, rows, num_kv_heads, group, all_top,
                      all_total, all_one, all_two, BLOCK_ROWS, BLOCK_GROUP)
                part += 1
                all_top, all_total, all_one, all_two = top, total, y_one, y_two
                part_end += keys * CHUNKS
    if not RUNS:
        if CHUNKS > 1:
            top, total, y_one, y_two = all_top, all_total, all_one, all_two
        if stats_ptr is None:
            factor = average_factor(total, visible, load_scale(v_scale_ptr, head, v_scale_stride))[None, :]
            y_one, y_two = average(y_one + 0.0, factor, visible), average(y_two + 0.0, factor, visible)
        leave(partial_ptr, stats_ptr, b, head, row_block, part, parts, rows, num_kv_heads, group, top, total, y_one,
              y_two, BLOCK_ROWS, BLOCK_GROUP)


@triton.jit
def leave(partial_ptr, stats_ptr, b, head, row_block, part, parts, rows, num_kv_heads, group, top, total, y_one, y_two,
          BLOCK_ROWS: tl.constexpr, BLOCK_GROUP: tl.constexpr):
    """What a part comes to, where the merge finds it."""
    HALF: tl.constexpr = y_one.shape[0]
    m = tl.arange(0, BLOCK_ROWS * BLOCK_GROUP)
    row, g = row_block * BLOCK_ROWS + m // BLOCK_GROUP, m % BLOCK_GROUP
    live = (row < rows) & (g < group)
    at = ((b.to(tl.int64) * rows + row) * (num_kv_heads * group) + head * group + g) * parts + part
    out = partial_ptr + at[None, :] * (2 * HALF) + tl.arange(0, HALF)[:, None]
    if stats_ptr is not None:
        tl.store(stats_ptr + at * 2, top, mask=live)
        tl.store(stats_ptr + at * 2 + 1, total, mask=live)
    tl.store(out, y_one.to(out.dtype.element_ty), mask=live[None, :])
    tl.store(out + HALF, y_two.to(out.dtype.element_ty), mask=live[None, :])


@triton.jit
def average_factor(total, visible, v_scale):
    return tl.div_rn(v_scale + tl.zeros_like(total), tl.where(visible > 0, total, 1.0))


@triton.jit
def average(y, factor, visible):
    """Without a key, nothing is multiplied."""
    return tl.where(visible > 0, y * factor, 0.0)


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


@triton.jit(do_not_specialize=["table_stride", "table_size", "page_size", "bound", "max_chunks", "parts", "per_request",
                               "group", "v_scale_stride"],
            do_not_specialize_on_alignment=["seq_lens_ptr", "kv_indptr_ptr", "table_ptr"])
def merge(
    partial_ptr, stats_ptr, out_ptr, table_ptr, seq_lens_ptr, kv_indptr_ptr, v_scale_ptr, table_stride, table_size,
    page_size, bound, max_chunks, chunk_weight, parts, per_request, num_qo_heads, group, v_scale_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr, CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):
    """Grid (batch * rows * num_qo_heads, head_dim / BLOCK_D). Folds in their order, AHEAD of them loaded at a time.

    A thread has its elements of all parts, so the order of the sums follows neither the tile nor how many were planned.
    """
    let_others_start(EARLY)
    EACH: tl.constexpr = FOLD // CHUNKS  # parts of a fold
    at = tl.program_id(0)
    _, _, visible = locate(table_ptr, seq_lens_ptr, kv_indptr_ptr, table_stride, table_size, page_size, bound,
                           at // per_request)
    keys = chunk_size(visible, max_chunks, chunk_weight, BLOCK_N)
    v_scale = load_scale(v_scale_ptr, at % num_qo_heads // group, v_scale_stride)
    live_parts = tl.cdiv(tl.cdiv(visible, keys), CHUNKS)
    wait_for_others(EARLY)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    all_top, all_total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    all_y = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, live_parts, AHEAD * EACH):
        tops, totals, ys = (), (), ()  # all loads are in flight before the first is waited for
        for j in tl.static_range(AHEAD * EACH):
            live = first + j < live_parts
            place = at.to(tl.int64) * parts + first + j
            tops += (tl.load(stats_ptr + place * 2, mask=live, other=float("-inf")),)
            totals += (tl.load(stats_ptr + place * 2 + 1, mask=live, other=0.0),)
            ys += (tl.load(partial_ptr + place * HEAD_DIM + d, mask=live, other=0.0),)
        tops, ys = after_all(tops, parts >> 30), after_all(ys, parts >> 30)
        for i in tl.static_range(AHEAD):
            top, total, y = tops[i * EACH], totals[i * EACH], ys[i * EACH]
            for j in tl.static_range(1, EACH):
                top, total, shrink, new_shrink = fold(top, total, tops[i * EACH + j], totals[i * EACH + j])
                y = tl.fma(y, shrink, ys[i * EACH + j] * new_shrink)
            all_top, all_total, shrink, new_shrink = fold(all_top, all_total, top, total)
            all_y = tl.fma(all_y, shrink, y * new_shrink)
    all_y = average(all_y, average_factor(all_total, visible, v_scale), visible)
    tl.store(out_ptr + at.to(tl.int64) * HEAD_DIM + d, all_y.to(out_ptr.dtype.element_ty))
