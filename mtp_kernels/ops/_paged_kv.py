"""What is checked of a paged KV cache and its page table, by draft_attention and by KVView under its own names."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.draft_attention import gather, gather_width, locate_keys, table_extent
from ._checks import (
    FP8,
    check_dtype,
    check_float,
    check_index,
    check_last_contiguous,
    check_shape,
    fail,
    require,
    show_dtypes,
    show_shape,
)
from ._contents import check_contents, check_contents_range


def check_caches(
    where: str,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_name: str = "k_cache",
    v_name: str = "v_cache",
) -> None:
    """K and V [num_pages, page_size, num_kv_heads, head_dim] agree, and an fp8 cache has its scales."""
    heads = k.size(2)
    require(heads > 0, where, k_name, "at least 1 KV head", heads)
    if v.shape != k.shape:
        fail(where, v_name, show_shape(k.shape), show_shape(v.shape), f"the shape of {k_name}")
    check_float(where, v_name, v, k, k_name)
    check_last_contiguous(where, **{k_name: k, v_name: v})
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if k.dtype in FP8:
                fail(where, name, "a tensor", None, f"{k_name} is {show_dtypes([k.dtype])}")
            continue
        if scale.numel() != 1 and tuple(scale.shape) != (heads,):
            fail(where, name, f"one element or [{heads}]", show_shape(scale.shape), f"{k_name} has {heads} KV heads")
        check_dtype(where, name, scale, (torch.float32,))
        check_last_contiguous(where, **{name: scale})


def check_table(
    where: str,
    table: Tensor,
    seq_lens: Tensor,
    kv_indptr: Tensor | None,
    batch: int,
    why: str,
    table_name: str = "block_table",
) -> None:
    """The page table, flat beside `kv_indptr` and else [batch, *], and the lengths of `batch` requests."""
    if kv_indptr is None:
        check_shape(where, table_name, table, (batch, None), why)
    else:
        check_shape(where, "kv_indptr", kv_indptr, (batch + 1,), why)
        check_index(where, "kv_indptr", kv_indptr)
        check_shape(where, table_name, table, (None,), "flat beside kv_indptr")
    check_index(where, table_name, table)
    check_shape(where, "seq_lens", seq_lens, (batch,), why)
    check_index(where, "seq_lens", seq_lens)
    check_last_contiguous(where, **{table_name: table}, kv_indptr=kv_indptr, seq_lens=seq_lens)


def check_table_contents(
    where: str,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_indptr: Tensor | None,
    max_seq_len: int,
    window_left: int,
) -> None:
    """kv_indptr rises within the table, lengths fit table and promise, and pages with a visible key exist."""
    num_pages, page_size = k_cache.shape[:2]
    if kv_indptr is None:
        pages = block_table.size(1)
        why = f"block_table has {pages} pages of {page_size} keys a request"
        check_contents_range(where, "seq_lens", seq_lens, 0, pages * page_size, why)
    else:
        entries = block_table.numel()
        check_contents_range(where, "kv_indptr", kv_indptr, 0, entries, f"block_table has {entries} entries")
        falls = kv_indptr.diff(prepend=kv_indptr[:1]) < 0
        check_contents(where, "kv_indptr", kv_indptr, falls, "at least the value before it")
        bad = (seq_lens < 0) | (seq_lens.long() > kv_indptr.long().diff() * page_size)
        check_contents(where, "seq_lens", seq_lens, bad, f"0 to {page_size} times the request's pages in kv_indptr")
    if max_seq_len >= 0:
        check_contents_range(where, "seq_lens", seq_lens, 0, max_seq_len, f"max_seq_len is {max_seq_len}")
    entries_seen = visible_entries(block_table, seq_lens, kv_indptr, page_size, window_left)
    why = f"k_cache has {num_pages} pages"
    check_contents_range(where, "block_table", block_table, 0, num_pages - 1, why, entries_seen)


def visible_entries(
    block_table: Tensor, seq_lens: Tensor, kv_indptr: Tensor | None, page_size: int, window_left: int
) -> Tensor:
    """The mask of table entries (shape of `block_table`) whose page holds a visible key."""
    first, lengths = table_extent(block_table, seq_lens, kv_indptr, page_size)
    place = torch.arange(block_table.size(-1), device=block_table.device)
    if kv_indptr is None:
        key, n = place * page_size, lengths.unsqueeze(1)  # the entry's first key
    else:
        # Entries behind the last request belong to an added one without keys.
        request = torch.searchsorted(kv_indptr[1:].long().contiguous(), place, right=True)
        key = (place - torch.cat([first, first.new_zeros(1)])[request]) * page_size
        n = torch.cat([lengths, lengths.new_zeros(1)])[request]
    begin = (n - window_left - 1).clamp(min=0) if window_left >= 0 else torch.zeros_like(n)
    return (key < n) & (key + page_size > begin)


def check_visible_finite(
    where: str,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    kv_indptr: Tensor | None,
    max_seq_len: int,
    window_left: int,
) -> None:
    """No visible element of K or V is NaN or infinite."""
    width = gather_width(k_cache, block_table, max_seq_len, window_left)
    if width == 0:
        return
    pages, slots, visible = locate_keys(k_cache, block_table, seq_lens, kv_indptr, width)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        for b in range(seq_lens.size(0)):  # one request at a time: the cache may fill most of the device
            one = slice(b, b + 1)
            bad = ~torch.isfinite(gather(cache, pages[one], slots[one], visible[one], None))
            if bool(bad.any()):
                _, column, head, i = torch.nonzero(bad)[0].tolist()
                index = [int(pages[b, column]), int(slots[b, column]), head, i]
                got = cache[tuple(index)].item()
                fail(where, f"{name}{index}", "a finite value", got, f"visible to request {b}")
