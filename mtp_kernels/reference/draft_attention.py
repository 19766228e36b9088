"""Reference of draft_attention: gather each request's visible keys through its page table, then plain attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ._math import accumulate, matmul, rms_norm

GATHER = 1 << 24  # elements of K gathered at a time: 64 MB in fp32, whatever the batch


def draft_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    kv_indptr: Tensor | None = None,
    max_seq_len: int = -1,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    q_norm_eps: float = 1e-6,
    rope_inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """softmax(softcap(rope(rmsnorm(q)) @ K.T * sm_scale)) @ V over the visible keys, rounded once at the end."""
    output = q.new_zeros(q.shape)
    width = gather_width(k_cache, block_table, max_seq_len, window_left)
    if width == 0 or output.numel() == 0:
        return output
    x = accumulate(q) if q_norm_weight is None else rms_norm(q, q_norm_weight, q_norm_eps)
    if rope_inv_freq is not None and positions is not None:
        x = rope(x, rope_inv_freq, positions)
    pages, slots, visible = locate_keys(k_cache, block_table, seq_lens, kv_indptr, width)  # each [batch, width]
    at_once = max(1, GATHER // (width * k_cache[0, 0].numel()))
    for start in range(0, q.size(0), at_once):
        part = slice(start, start + at_once)
        seen = visible[part]
        k = gather(k_cache, pages[part], slots[part], seen, k_scale)  # [part, width, num_kv_heads, head_dim]
        v = gather(v_cache, pages[part], slots[part], seen, v_scale)
        output[part] = attend(x[part], k, v, seen, sm_scale, logits_soft_cap)
    return output


def gather_width(k_cache: Tensor, block_table: Tensor, max_seq_len: int, window_left: int) -> int:
    """The most keys that any request can see, known on the host. A flat table bounds a request by its whole length."""
    num_pages, page_size = k_cache.shape[:2]
    width = block_table.size(-1) * page_size if num_pages > 0 else 0
    if max_seq_len >= 0:
        width = min(width, max_seq_len)
    if window_left >= 0:
        width = min(width, window_left + 1)
    return width


def locate_keys(
    k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, kv_indptr: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Page, slot in the page, and visibility of the last `width` keys of each request, [batch, width] each.

    Columns end at the last key, so a request with fewer keys has its invisible columns in front. Those point at its
    first key: something has to be loaded there, and `gather` masks it.
    """
    num_pages, page_size = k_cache.shape[:2]
    first, lengths = table_extent(block_table, seq_lens, kv_indptr, page_size)
    key = lengths.unsqueeze(1) - width + torch.arange(width, device=lengths.device)  # [batch, width]
    visible = key >= 0
    key = key.clamp(min=0)
    entry = torch.div(key, page_size, rounding_mode="floor")
    if kv_indptr is None:
        page = block_table.gather(1, entry)
    else:
        page = block_table[(first.unsqueeze(1) + entry).clamp(max=block_table.numel() - 1)]
    page = page.long().clamp(0, num_pages - 1)  # int64 from here on: page * stride does not fit in 32 bits
    return page, key % page_size, visible


def table_extent(
    block_table: Tensor, seq_lens: Tensor, kv_indptr: Tensor | None, page_size: int
) -> tuple[Tensor, Tensor]:
    """First table entry and number of keys of each request, [batch] int64 each, clamped to what the table holds."""
    lengths = seq_lens.long()
    if kv_indptr is None:
        return torch.zeros_like(lengths), lengths.clamp(0, block_table.size(1) * page_size)
    bounds = kv_indptr.long().clamp(0, block_table.numel())
    capacity = (bounds[1:] - bounds[:-1]).clamp(min=0) * page_size
    return bounds[:-1], torch.minimum(lengths.clamp(min=0), capacity)


def gather(cache: Tensor, pages: Tensor, slots: Tensor, visible: Tensor, scale: Tensor | None) -> Tensor:
    """cache[page, slot] * scale, exactly 0 where not visible (the slot may hold NaN), in accumulation dtype."""
    if cache.dtype.itemsize == 1:  # not every device indexes fp8
        rows = accumulate(cache.view(torch.uint8)[pages, slots].view(cache.dtype))
    else:
        rows = accumulate(cache[pages, slots])
    if scale is not None:
        rows = rows * scale.to(rows.dtype).reshape(-1, 1)  # one element, or one a KV head
    return rows.masked_fill(~visible[:, :, None, None], 0)


def rope(x: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim/2), i < num_pairs, of x [batch, rows, heads, head_dim] by position * inv_freq[i].

    The angle is one fp32 product, rounded once, and that is its definition: in fp64 too, where only sine and cosine
    gain precision. The target's keys were turned by the same rounded angles, and at position 2^18 the rounding moves
    an angle by up to 2^-7: a comparison with unrounded angles would hide errors a thousand times those of the sine.
    """
    pairs, half = inv_freq.numel(), x.size(-1) // 2
    angle = positions.float().reshape(x.size(0), -1, 1, 1) * inv_freq.float()  # [batch, rows or 1, 1, num_pairs]
    cos, sin = angle.to(x.dtype).cos(), angle.to(x.dtype).sin()
    one, two = x[..., :pairs], x[..., half : half + pairs]
    turned = (one * cos - two * sin, x[..., pairs:half], two * cos + one * sin, x[..., half + pairs :])
    return torch.cat(turned, dim=-1)


def attend(x: Tensor, k: Tensor, v: Tensor, visible: Tensor, sm_scale: float, logits_soft_cap: float) -> Tensor:
    """Attention of x [batch, rows, num_qo_heads, head_dim]; query head h reads KV head h // group. Zeros for no key."""
    batch, rows, num_qo_heads, head_dim = x.shape
    num_kv_heads = k.size(2)
    x = x.unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(2, 3)  # [batch, num_kv_heads, rows * group, dim]
    scores = matmul(x, k.permute(0, 2, 3, 1)) * sm_scale  # [batch, num_kv_heads, rows * group, width]
    if logits_soft_cap > 0:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    y = matmul(scores.softmax(-1), v.transpose(1, 2))  # [batch, num_kv_heads, rows * group, dim]
    y = y.unflatten(2, (rows, -1)).transpose(1, 2).reshape(batch, rows, num_qo_heads, head_dim)
    return y.masked_fill(~visible.any(1)[:, None, None, None], 0)
