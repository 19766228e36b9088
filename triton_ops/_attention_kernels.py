"""Kernels of draft_attention: one KV split of a request and KV head a program; then the merge of the splits.

A draft has few queries and many keys. Scores are [keys, queries], so that the few queries are the short side of a
tensor core's tile (8) and K is its long one; the average is [queries, head_dim], so that V, too, is read as it lies.
Both tiles come by asynchronous copies, whose rows the page table gives one tile earlier still. A query is a row of
the request and a head of the group that shares the KV head: a tree's frontier reads each key once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._attention_math import decode_fp8, sincos, tanh
from ._early import let_others_start, wait_for_others

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
def split_size(visible, max_splits, split_weight, BLOCK_N: tl.constexpr):
    """Keys a split, a multiple of BLOCK_N, from the visible keys alone: no batch and no table may change a result.

    It grows with the square root of them: a few keys read by many programs where there is little to read, and few
    partial results where there is much.
    """
    keys = tl.sqrt_rn(visible.to(tl.float32) * split_weight).to(tl.int32) + 1
    return tl.cdiv(tl.maximum(keys, tl.cdiv(visible, max_splits)), BLOCK_N) * BLOCK_N


@triton.jit
def find_pages(table, key, end, page_size, num_pages, LOG2_PAGE: tl.constexpr):
    """The page of each key before `end`, as int64 within the cache. No other entry of the table is read."""
    entry = key // page_size if LOG2_PAGE < 0 else key >> LOG2_PAGE
    page = tl.load(table + entry, mask=key < end, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1)


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
        mean = (tl.sum(one * one, 2) + tl.sum(two * two, 2)) / (2 * HALF)
        factor = (1.0 / tl.sqrt_rn(mean + eps))[:, :, None]
        one = one * factor * norm_one
        two = two * factor * norm_two
    if freq_ptr is not None:
        one, two = one * cosine - two * sine, two * cosine + one * sine
    dtype = q_ptr.dtype.element_ty
    one = tl.reshape(one.to(dtype), (BLOCK_ROWS * BLOCK_GROUP, HALF))
    two = tl.reshape(two.to(dtype), (BLOCK_ROWS * BLOCK_GROUP, HALF))
    return one, two


@triton.jit
def load_scale(scale_ptr, head, scale_stride):
    return 1.0 if scale_ptr is None else tl.load(scale_ptr + head * scale_stride)


@triton.jit
def load_cache(at, mask, dtype: tl.constexpr):
    """A tile of K or V in the dtype of q; zeros, not what lies there, where no key is visible."""
    if at.dtype.element_ty == tl.uint8:
        return decode_fp8(tl.load(at, mask=mask, other=0), dtype)
    return tl.load(at, mask=mask, other=0.0).to(dtype)


@triton.jit(do_not_specialize=["num_pages", "page_size", "bound", "max_splits", "split_weight", "rows", "num_kv_heads",
                               "group", "num_pairs", "table_size", "table_stride",
                               "position_stride_batch", "position_stride", "k_scale_stride", "v_scale_stride"],
            do_not_specialize_on_alignment=["seq_lens_ptr", "kv_indptr_ptr", "table_ptr", "positions_ptr"])
def attend_split(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, kv_indptr_ptr, k_scale_ptr, v_scale_ptr, norm_ptr, freq_ptr,
    positions_ptr,
    partial_ptr,  # [batch * rows * num_qo_heads, splits, head_dim] fp32; the result itself where one split is all
    lse_ptr,  # [batch * rows * num_qo_heads, splits] fp32, base 2, of scores in the same base
    q_stride_batch, q_stride_row, q_stride_head,
    k_stride_page, k_stride_slot, k_stride_head,
    v_stride_page, v_stride_slot, v_stride_head,
    table_stride, table_size, position_stride_batch, position_stride, k_scale_stride, v_scale_stride,
    num_pages, page_size, bound, max_splits, split_weight, rows, num_kv_heads, group, num_pairs, sm_scale,
    logits_soft_cap, eps,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_PAGE: tl.constexpr, SOFT_CAP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr = False,
):
    """Grid (batch * num_kv_heads * row blocks, splits)."""
    let_others_start(EARLY)
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_M: tl.constexpr = BLOCK_ROWS * BLOCK_GROUP
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    row_block, head = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks % num_kv_heads
    b = tl.program_id(0) // (row_blocks * num_kv_heads)
    split, splits = tl.program_id(1), tl.num_programs(1)

    table, first, visible = locate(table_ptr, seq_lens_ptr, kv_indptr_ptr, table_stride, table_size, page_size, bound,
                                   b)
    keys = split_size(visible, max_splits, split_weight, BLOCK_N)
    begin = split * keys
    if lse_ptr is not None and begin >= visible:
        wait_for_others(EARLY)  # a kernel that ends before those in front of it would let the next one run too soon
        return
    end = first + tl.minimum(begin + keys, visible)
    begin += first

    n = tl.arange(0, BLOCK_N)
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    q_at = q_ptr + b.to(tl.int64) * q_stride_batch + (head * group).to(tl.int64) * q_stride_head
    q_one, q_two = load_queries(
        q_at, norm_ptr, freq_ptr, positions_ptr + b * position_stride_batch if freq_ptr is not None else None,
        q_stride_row, q_stride_head, position_stride, row, rows, num_pairs, group, eps, HALF, BLOCK_ROWS, BLOCK_GROUP,
        EARLY)
    q_one, q_two = tl.trans(q_one), tl.trans(q_two)  # [head_dim / 2, queries]
    scale = sm_scale * load_scale(k_scale_ptr, head, k_scale_stride)
    if not SOFT_CAP:
        scale = scale * LOG2_E

    i = tl.arange(0, HALF)
    k_head, v_head = k_ptr + head.to(tl.int64) * k_stride_head, v_ptr + head.to(tl.int64) * v_stride_head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y_one = tl.zeros([BLOCK_M, HALF], tl.float32)  # [queries, head_dim / 2]
    y_two = tl.zeros([BLOCK_M, HALF], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + n
        seen = (key < end)[:, None]  # [keys, 1]
        page = find_pages(table, key, end, page_size, num_pages, LOG2_PAGE)
        slot = (key % page_size if LOG2_PAGE < 0 else key & ((1 << LOG2_PAGE) - 1)).to(tl.int64)
        k_at = k_head + (page * k_stride_page + slot * k_stride_slot)[:, None] + i[None, :]
        v_at = v_head + (page * v_stride_page + slot * v_stride_slot)[:, None] + i[None, :]
        # Scaled before they are added, or the compiler makes one chain of dependent products of the two.
        s = tl.dot(load_cache(k_at, seen, dtype), q_one, input_precision="ieee") * scale  # [keys, queries]
        s += tl.dot(load_cache(k_at + HALF, seen, dtype), q_two, input_precision="ieee") * scale
        v_one = load_cache(v_at, seen, dtype)  # [keys, head_dim / 2]
        v_two = load_cache(v_at + HALF, seen, dtype)
        if SOFT_CAP:
            s = logits_soft_cap * LOG2_E * tanh(s / logits_soft_cap)
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 0)
        p = tl.trans(p.to(dtype))  # [queries, keys]
        y_one = tl.dot(p, v_one, y_one * shrink[:, None], input_precision="ieee")
        y_two = tl.dot(p, v_two, y_two * shrink[:, None], input_precision="ieee")
        top = new_top

    factor = load_scale(v_scale_ptr, head, v_scale_stride) / tl.where(total > 0, total, 1.0)
    m = tl.arange(0, BLOCK_M)
    m_row, g = row_block * BLOCK_ROWS + m // BLOCK_GROUP, m % BLOCK_GROUP
    live = (m_row < rows) & (g < group)
    at = ((b.to(tl.int64) * rows + m_row) * (num_kv_heads * group) + head * group + g) * splits + split
    if lse_ptr is not None:
        tl.store(lse_ptr + at, top + tl.log2(total), mask=live)
    out = partial_ptr + at[:, None] * HEAD_DIM + i[None, :]
    store_average(out, y_one, factor, visible, live)
    store_average(out + HALF, y_two, factor, visible, live)


@triton.jit
def store_average(at, y, factor, visible, live):
    """+ 0 makes -0 into the +0 that a merge of one split gives; without a key, nothing is multiplied."""
    y = tl.where(visible > 0, y * factor[:, None] + 0.0, 0.0)
    tl.store(at, y.to(at.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["table_stride", "table_size", "page_size", "bound", "max_splits", "split_weight",
                               "splits", "per_request"],
            do_not_specialize_on_alignment=["seq_lens_ptr", "kv_indptr_ptr", "table_ptr"])
def merge_splits(
    partial_ptr, lse_ptr, out_ptr, table_ptr, seq_lens_ptr, kv_indptr_ptr, table_stride, table_size, page_size, bound,
    max_splits, split_weight, splits, per_request,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Grid (batch * rows * num_qo_heads, head_dim / BLOCK_D).

    Sums over BLOCK_S = max_splits, however few were planned: the order of a sum may not follow the table's width.
    """
    let_others_start(EARLY)
    at = tl.program_id(0)
    _, _, visible = locate(table_ptr, seq_lens_ptr, kv_indptr_ptr, table_stride, table_size, page_size, bound,
                           at // per_request)
    s = tl.arange(0, BLOCK_S)
    live = s * split_size(visible, max_splits, split_weight, BLOCK_N) < visible
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = at.to(tl.int64) * splits + s
    wait_for_others(EARLY)
    lse = tl.load(lse_ptr + place, mask=live, other=float("-inf"))
    part = tl.load(partial_ptr + place[:, None] * HEAD_DIM + d[None, :], mask=live[:, None], other=0.0)
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(visible > 0, top, 0.0))
    total = tl.sum(weight, 0)
    y = tl.sum(weight[:, None] * part, 0) / tl.where(visible > 0, total, 1.0)
    tl.store(out_ptr + at.to(tl.int64) * HEAD_DIM + d, y.to(out_ptr.dtype.element_ty))
