"""The first kernel of draft_attention: chunks of keys, or folds of chunks, one or more a program.

A draft has few queries and many keys. Scores are [keys, queries] and the average is [head_dim, queries], so that the
few queries are the short side of a tensor core's tile (8), and K and V are read as they lie. Each warp multiplies its
own slab of K's columns, and of V's where 16 queries would make that Hopper's wgmma, which waits longer. Tiles of K and
V come by asynchronous copies, whose rows the page table gives one tile earlier still. A query is a row of the request
and a head of the group that shares the KV head: a tree's frontier reads each key once.

A chunk is the unit of arithmetic: its running maximum, its sum, and its average, not divided by the sum yet, start from
nothing. FOLD consecutive chunks are folded in order, and the folds by pairs (_attention_merge.py). One request alone
needs a program for each chunk; where there are many, a program runs folds of chunks, and leaves that much less to write
and to merge. The kernels give the same bits in all ways: what they share leaves the compiler no choice of what to
round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._attention_math import decode_fp8, sincos, tanh
from ._early import let_others_start, wait_for_others
from ._gemm import block_columns
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
def chunk_size(visible, max_chunks, chunk_weight, MULTIPLE: tl.constexpr):
    """Keys a chunk, a multiple of MULTIPLE, from the visible keys alone: no batch and no table may change a result.

    It grows with the square root of them: a few keys read by many programs where there is little to read, and few
    partial results where there is much.
    """
    keys = tl.ceil(tl.sqrt_rn(visible.to(tl.float32) * chunk_weight)).to(tl.int32)
    keys = tl.maximum(tl.maximum(keys, tl.cdiv(visible, max_chunks)), 1)
    return tl.cdiv(keys, MULTIPLE) * MULTIPLE


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
def load_turns(norm_ptr, freq_ptr, positions_ptr, position_stride, row, rows, num_pairs, HALF: tl.constexpr,
               BLOCK_ROWS: tl.constexpr, BLOCK_GROUP: tl.constexpr):
    """What queries are normed and turned with, each [rows, group, head_dim / 2] as the queries will be: both halves of
    the norm's weight, and positions and frequencies.

    Loads behind each other, none of which waits for another. Every head has a copy of its own: what threads have to
    hand to each other costs a barrier.
    """
    i = tl.arange(0, HALF)[None, None, :]
    zeros = tl.zeros([BLOCK_ROWS, BLOCK_GROUP, HALF], tl.int32)
    norm_one, norm_two, position, freq = 1.0, 1.0, 0.0, 0.0
    if norm_ptr is not None:
        at = norm_ptr + (i + zeros)
        norm_one, norm_two = tl.load(at), tl.load(at + HALF)
    if freq_ptr is not None:
        there = positions_ptr + row * position_stride
        position = tl.load(there[:, None, None] + zeros, mask=(row < rows)[:, None, None] & (zeros == 0), other=0)
        freq = tl.load(freq_ptr + (i + zeros), mask=(i < num_pairs) & (zeros == 0), other=0.0)  # the others do not turn
    return norm_one, norm_two, position, freq


@triton.jit
def load_queries(q_ptr, turns, NORMED: tl.constexpr, TURNED: tl.constexpr, q_stride_row, q_stride_head, row, rows,
                 group, eps, HALF: tl.constexpr, SLABS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                 BLOCK_GROUP: tl.constexpr, EARLY: tl.constexpr):
    """Both halves of the normed and turned queries, each [slabs, columns of a slab, queries], in dtype of q.

    RoPE pairs an element with that half a head away: with the halves apart, nothing has to be shuffled.
    """
    norm_one, norm_two, position, freq = turns
    g = tl.arange(0, BLOCK_GROUP)
    i = tl.arange(0, HALF)
    live = (row < rows)[:, None] & (g < group)[None, :]  # [rows, group]
    at = q_ptr + row.to(tl.int64)[:, None] * q_stride_row + g.to(tl.int64)[None, :] * q_stride_head
    at = at[:, :, None] + i[None, None, :]
    if TURNED:
        sine, cosine = sincos(position.to(tl.float32) * freq)
    wait_for_others(EARLY)  # for q alone: table, lengths and positions stay as they are in a round
    one = tl.load(at, mask=live[:, :, None], other=0.0).to(tl.float32)  # [rows, group, head_dim / 2]
    two = tl.load(at + HALF, mask=live[:, :, None], other=0.0).to(tl.float32)
    if NORMED:
        mean = (tl.sum(product(one, one), 2) + tl.sum(product(two, two), 2)) / (2 * HALF)
        factor = (1.0 / tl.sqrt_rn(mean + eps))[:, :, None]
        one = one * factor * norm_one.to(tl.float32)
        two = two * factor * norm_two.to(tl.float32)
    if TURNED:
        one, two = tl.fma(one, cosine, -(two * sine)), tl.fma(two, cosine, one * sine)
    dtype = q_ptr.dtype.element_ty
    one = tl.reshape(one.to(dtype), (BLOCK_ROWS * BLOCK_GROUP, HALF))
    two = tl.reshape(two.to(dtype), (BLOCK_ROWS * BLOCK_GROUP, HALF))
    shape: tl.constexpr = (SLABS, HALF // SLABS, BLOCK_ROWS * BLOCK_GROUP)
    return tl.reshape(tl.trans(one), shape), tl.reshape(tl.trans(two), shape)


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
              v_stride_slot, HALF: tl.constexpr, SLABS: tl.constexpr, V_SLABS: tl.constexpr, LOG2_PAGE: tl.constexpr,
              dtype: tl.constexpr):
    """Halves of K [slabs, keys, columns of a slab] and of V, and which keys are seen.

    V is [head_dim / 2, keys], or, in slabs of its own, [slabs, columns of a slab, keys].
    """
    SLAB: tl.constexpr = HALF // SLABS
    i = tl.arange(0, HALF)
    column = block_columns(SLABS, SLAB)[:, None, :]  # [slabs, 1, columns]
    seen = key < end
    page = find_pages(table, key, end, page_size, num_pages, LOG2_PAGE)
    slot = (key % page_size if LOG2_PAGE < 0 else key & ((1 << LOG2_PAGE) - 1)).to(tl.int64)
    k_at = k_head + (page * k_stride_page + slot * k_stride_slot)[None, :, None] + column
    # The addresses are turned, not the tile: that would take it out of the asynchronous copies.
    v_rows = v_head + (page * v_stride_page + slot * v_stride_slot)
    k_seen = seen[None, :, None]
    if V_SLABS == 1:
        v_at, v_seen = tl.trans(v_rows[:, None] + i[None, :]), tl.trans(seen[:, None])
    else:
        v_column = block_columns(V_SLABS, HALF // V_SLABS)[:, None, :]
        v_at = tl.permute(v_rows[None, :, None] + v_column, (0, 2, 1))
        v_seen = tl.permute(k_seen, (0, 2, 1))
    if V_SLABS > 1 and key.shape[0] > 16:
        # Not true of the keys, of which no two lie side by side: it makes the compiler deal them to lanes before slabs,
        # so that a thread has a key or two to find, not four. Of 16 keys a thread would have one, and the compiler
        # would then put slabs below each other in shared memory, where what a warp reads would lie in the same banks.
        k_at = tl.max_contiguous(k_at, [1, 2, SLAB])
        v_at = tl.max_contiguous(v_at, [1, HALF // V_SLABS, 2])
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
    prefetch(tl.where(is_value, v_at, k_at), (key < end)[:, None], BYTES)


@triton.jit
def along(factor, V_SLABS: tl.constexpr):
    """A factor of each query, for averages in so many slabs."""
    return factor[None, :] if V_SLABS == 1 else factor[None, None, :]


@triton.jit
def no_average(HALF: tl.constexpr, V_SLABS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of no key: [head_dim / 2, queries], or in slabs."""
    return tl.zeros([HALF, BLOCK_M] if V_SLABS == 1 else [V_SLABS, HALF // V_SLABS, BLOCK_M], tl.float32)


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
    V_SLABS: tl.constexpr = 1 if len(v_one.shape) == 2 else v_one.shape[0]
    if V_SLABS > 1:
        p = tl.broadcast_to(p[None, :, :], (V_SLABS, p.shape[0], p.shape[1]))
    y_one = tl.dot(v_one, p, y_one * along(shrink, V_SLABS), input_precision="ieee")
    y_two = tl.dot(v_two, p, y_two * along(shrink, V_SLABS), input_precision="ieee")
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
    SLABS: tl.constexpr, V_SLABS: tl.constexpr, CHUNKS: tl.constexpr, RUNS: tl.constexpr, LOG2_PAGE: tl.constexpr,
    SOFT_CAP: tl.constexpr, STAGES: tl.constexpr, ONE_TILE: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Grid (batch * num_kv_heads * row blocks, parts over `run`). A part is CHUNKS chunks; one loop over all tiles.

    RUNS: whether `run`, the parts of a program, is more than 1.
    ONE_TILE: a part is a chunk that never has more than one tile; then that is on its way before the queries are waited
    for. The cache is the target's, which no kernel of a round writes. LATE: of a chunk of more, the first tiles are,
    and the queries come into the loop. PREFETCH: L2 is asked for the first of a part's keys.
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
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    positions_at = positions_ptr + b * position_stride_batch if freq_ptr is not None else None
    if not LATE:
        turns = load_turns(norm_ptr, freq_ptr, positions_at, position_stride, row, rows, num_pairs, HALF, BLOCK_ROWS,
                           BLOCK_GROUP)

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
            v_stride_slot, HALF, SLABS, V_SLABS, LOG2_PAGE, dtype)

    q_at = q_ptr + b.to(tl.int64) * q_stride_batch + (head * group).to(tl.int64) * q_stride_head
    if not LATE:
        q_one, q_two = load_queries(
            q_at, turns, norm_ptr is not None, freq_ptr is not None, q_stride_row, q_stride_head, row, rows, group, eps,
            HALF, SLABS, BLOCK_ROWS, BLOCK_GROUP, EARLY)
    else:
        q_one = tl.zeros([SLABS, SLAB, BLOCK_M], dtype)
        q_two = tl.zeros([SLABS, SLAB, BLOCK_M], dtype)
        if begin >= end:
            wait_for_others(EARLY)
    scale = sm_scale * load_scale(k_scale_ptr, head, k_scale_stride)
    if not SOFT_CAP:
        scale = scale * LOG2_E

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y_one = no_average(HALF, V_SLABS, BLOCK_M)
    y_two = no_average(HALF, V_SLABS, BLOCK_M)
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
    for start in tl.range(begin, begin if ONE_TILE else end, BLOCK_N, num_stages=STAGES):
        k_one, k_two, v_one, v_two, seen = load_tile(
            k_head, v_head, table, start + n, end, page_size, num_pages, k_stride_page, k_stride_slot, v_stride_page,
            v_stride_slot, HALF, SLABS, V_SLABS, LOG2_PAGE, dtype)
        if LATE and start == begin:
            turns = load_turns(norm_ptr, freq_ptr, positions_at, position_stride, row, rows, num_pairs, HALF,
                               BLOCK_ROWS, BLOCK_GROUP)
            q_one, q_two = load_queries(
                q_at, turns, norm_ptr is not None, freq_ptr is not None, q_stride_row, q_stride_head, row, rows, group,
                eps, HALF, SLABS, BLOCK_ROWS, BLOCK_GROUP, EARLY)
        top, total, y_one, y_two = attend_tile(
            k_one, k_two, v_one, v_two, seen, q_one, q_two, top, total, y_one, y_two, scale, logits_soft_cap, SOFT_CAP,
            dtype)
        if SEVERAL and start + BLOCK_N >= tl.minimum(chunk_end, end):
            if CHUNKS > 1:
                all_top, all_total, shrink, new_shrink = fold(all_top, all_total, top, total)
                all_one = tl.fma(all_one, along(shrink, V_SLABS), y_one * along(new_shrink, V_SLABS))
                all_two = tl.fma(all_two, along(shrink, V_SLABS), y_two * along(new_shrink, V_SLABS))
            elif RUNS:
                leave(partial_ptr, stats_ptr, b, head, row_block, part, parts, rows, num_kv_heads, group, top, total,
                      y_one, y_two, BLOCK_ROWS, BLOCK_GROUP)
                part += 1
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            y_one = no_average(HALF, V_SLABS, BLOCK_M)
            y_two = no_average(HALF, V_SLABS, BLOCK_M)
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
            factor = average_factor(total, visible, load_scale(v_scale_ptr, head, v_scale_stride))
            factor = along(factor, V_SLABS)
            y_one, y_two = average(y_one + 0.0, factor, visible), average(y_two + 0.0, factor, visible)
        leave(partial_ptr, stats_ptr, b, head, row_block, part, parts, rows, num_kv_heads, group, top, total, y_one,
              y_two, BLOCK_ROWS, BLOCK_GROUP)


@triton.jit
def leave(partial_ptr, stats_ptr, b, head, row_block, part, parts, rows, num_kv_heads, group, top, total, y_one, y_two,
          BLOCK_ROWS: tl.constexpr, BLOCK_GROUP: tl.constexpr):
    """What a part comes to, where the merge finds it."""
    BLOCK_M: tl.constexpr = BLOCK_ROWS * BLOCK_GROUP
    HALF: tl.constexpr = y_one.numel // BLOCK_M
    y_one, y_two = tl.reshape(y_one, (HALF, BLOCK_M)), tl.reshape(y_two, (HALF, BLOCK_M))
    m = tl.arange(0, BLOCK_M)
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
