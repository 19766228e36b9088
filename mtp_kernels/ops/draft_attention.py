"""draft_attention: read-only attention of the draft queries over the target's paged KV."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..reference.draft_attention import draft_attention as reference
from ._checks import (
    FLOATS,
    FP8,
    check_device,
    check_dtype,
    check_float,
    check_index,
    check_last_contiguous,
    check_range,
    check_rank,
    check_scale_dtype,
    check_shape,
    fail,
    require,
    show_dtypes,
    show_shape,
)
from ._contents import check_contents_finite
from ._paged_kv import check_caches, check_table, check_table_contents, check_visible_finite
from ._registry import Spec, cpp_kernel, cuda_kernel, register, triton_kernel

NAME = "draft_attention"
SCHEMA = (
    "draft_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, float sm_scale, *, "
    "Tensor? kv_indptr=None, SymInt max_seq_len=-1, int window_left=-1, float logits_soft_cap=0.0, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? q_norm_weight=None, float q_norm_eps=1e-6, "
    "Tensor? rope_inv_freq=None, Tensor? positions=None) -> Tensor"
)


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
    """y = softmax(softcap(rope(rmsnorm(q)) @ K.T * sm_scale)) @ V over the visible keys of each request.

    Of the n = seq_lens[b] keys that the table lists, the last min(n, window_left + 1) are visible, or all where
    window_left < 0, to every row alike. Table entries without a visible key may hold anything and decide nothing, as
    may invisible slots of visible pages (NaN too). n = 0 gives exact zeros. Lengths are clamped to what the table
    holds, page ids to 0..num_pages - 1.

    Args:
        q: [batch, rows, num_qo_heads, head_dim], bf16, fp16 or fp32, head_dim even.
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim], dtype of `q` or float8_e4m3fn, each with its
            own strides (HND and interleaved caches as permuted views). Query head h reads KV head
            h // (num_qo_heads // num_kv_heads).
        block_table: [batch, max_pages] int32 or int64; with `kv_indptr` flat, [num_entries], which may be longer than
            the last request's end.
        seq_lens: [batch] int32 or int64, n.
        sm_scale: factor of the scores; Gemma 4 uses 1.0.
        kv_indptr: [batch + 1] int32 or int64: request b's pages are block_table[kv_indptr[b] : kv_indptr[b + 1]].
        max_seq_len: the caller's promise that no length is greater, which bounds work and workspace and changes no
            result; -1 for no promise. What a request longer than that gets is not defined (MTP_DEBUG=1 names it).
        window_left: visible keys before the last one; negative for all.
        logits_soft_cap: cap > 0: s = cap * tanh(s / cap), after sm_scale; 0 for none.
        k_scale, v_scale: fp32, one element or [num_kv_heads]: K = k_cache * k_scale. Required for fp8 caches, applied
            to others as well where given.
        q_norm_weight: [head_dim], dtype of `q` or fp32: RMS norm of each query head first (weight w, not 1 + w).
        q_norm_eps: its epsilon.
        rope_inv_freq: [num_pairs] fp32, num_pairs <= head_dim / 2: then the pair (i, i + head_dim / 2) turns by the
            fp32 product positions * rope_inv_freq[i].
        positions: [batch] or [batch, rows] int32 or int64, given with `rope_inv_freq` and only then.

    Returns:
        [batch, rows, num_qo_heads, head_dim], dtype of `q`; accumulated in fp32 and rounded once.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device, a missing scale, rope_inv_freq without positions.

    `supports` takes head_dim, num_qo_heads, num_kv_heads, page_size and kv_dtype.

    >>> k = torch.zeros(3, 2, 1, 2)  # 3 pages of 2 slots, 1 KV head
    >>> v = torch.arange(6.0).view(3, 2, 1, 1).expand(3, 2, 1, 2).contiguous()
    >>> q, table = torch.ones(1, 1, 1, 2), torch.tensor([[2, 0, -1]])
    >>> draft_attention(q, k, v, table, torch.tensor([3]), 1.0)  # the mean of 4, 5 and 0
    tensor([[[[3., 3.]]]])
    >>> draft_attention(q, k, v, table, torch.tensor([3]), 1.0, window_left=1)
    tensor([[[[2.5000, 2.5000]]]])
    """
    return torch.ops.mtp.draft_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        sm_scale,
        kv_indptr=kv_indptr,
        max_seq_len=max_seq_len,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        q_norm_weight=q_norm_weight,
        q_norm_eps=q_norm_eps,
        rope_inv_freq=rope_inv_freq,
        positions=positions,
    )


def check(
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
) -> None:
    check_rank(NAME, "q", q, 4)
    check_float(NAME, "q", q)
    batch, _, num_qo_heads, head_dim = q.shape
    require(head_dim % 2 == 0, NAME, "q", "an even head_dim", head_dim)
    check_shape(NAME, "k_cache", k_cache, (None, None, None, head_dim), f"head_dim of q is {head_dim}")
    check_dtype(NAME, "k_cache", k_cache, (q.dtype, *FP8), f"q is {show_dtypes([q.dtype])}")
    check_caches(NAME, k_cache, v_cache, k_scale, v_scale)
    heads = k_cache.size(2)
    divides = f"a number of KV heads that divides {num_qo_heads}"
    require(num_qo_heads % heads == 0, NAME, "k_cache", divides, heads, f"q has {num_qo_heads} heads")
    check_table(NAME, block_table, seq_lens, kv_indptr, batch, f"batch of q is {batch}")
    check_range(NAME, "max_seq_len", max_seq_len, -1)
    good_cap = math.isfinite(logits_soft_cap) and logits_soft_cap >= 0
    require(good_cap, NAME, "logits_soft_cap", "a finite value of at least 0", logits_soft_cap)
    if q_norm_weight is not None:
        check_shape(NAME, "q_norm_weight", q_norm_weight, (head_dim,), f"head_dim of q is {head_dim}")
        check_scale_dtype(NAME, "q_norm_weight", q_norm_weight, q, "q")
    _check_rope(q, rope_inv_freq, positions)
    check_last_contiguous(NAME, q=q, q_norm_weight=q_norm_weight, rope_inv_freq=rope_inv_freq, positions=positions)
    check_device(
        NAME, q.device, "q", k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens,
        kv_indptr=kv_indptr, k_scale=k_scale, v_scale=v_scale, q_norm_weight=q_norm_weight,
        rope_inv_freq=rope_inv_freq, positions=positions,
    )


def _check_rope(q: Tensor, rope_inv_freq: Tensor | None, positions: Tensor | None) -> None:
    batch, rows, _, head_dim = q.shape
    if rope_inv_freq is None:
        require(positions is None, NAME, "rope_inv_freq", "a tensor", None, "positions is given")
        return
    if positions is None:
        fail(NAME, "positions", "a tensor", None, "rope_inv_freq is given")
        return
    check_rank(NAME, "rope_inv_freq", rope_inv_freq, 1)
    check_dtype(NAME, "rope_inv_freq", rope_inv_freq, (torch.float32,))
    pairs, most = rope_inv_freq.size(0), head_dim // 2
    require(pairs <= most, NAME, "rope_inv_freq", f"at most {most} pairs", pairs, f"head_dim of q is {head_dim}")
    if tuple(positions.shape) not in ((batch,), (batch, rows)):
        got, why = show_shape(positions.shape), f"q has batch {batch} and {rows} rows"
        fail(NAME, "positions", f"[{batch}] or [{batch}, {rows}]", got, why)
    check_index(NAME, "positions", positions)


def outputs(q: Tensor, *args: Any, **kwargs: Any) -> Spec:
    return tuple(q.shape), q.dtype


def contents(
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    rope_inv_freq: Tensor | None = None,
    **unused: Any,
) -> None:
    check_contents_finite(NAME, q=q, q_norm_weight=q_norm_weight, rope_inv_freq=rope_inv_freq, k_scale=k_scale,
                          v_scale=v_scale)
    table = (block_table, seq_lens, kv_indptr, max_seq_len, window_left)
    check_table_contents(NAME, k_cache, *table)
    check_visible_finite(NAME, k_cache, v_cache, *table)


def supports(
    head_dim: int | None = None,
    num_qo_heads: int | None = None,
    num_kv_heads: int | None = None,
    page_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Why no implementation serves calls of this shape, or "": the reference takes any even head_dim."""
    sizes = {"head_dim": head_dim, "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "page_size": page_size}
    for name, size in sizes.items():
        if size is not None and size < 1:
            return f"{name} {size} is not at least 1"
    if head_dim is not None and head_dim % 2:
        return f"head_dim {head_dim} is not even"
    if num_qo_heads is not None and num_kv_heads is not None and num_qo_heads % num_kv_heads:
        return f"{num_qo_heads} query heads are not a multiple of {num_kv_heads} KV heads"
    if kv_dtype is not None and kv_dtype not in (*FLOATS, *FP8):
        return f"kv_dtype {show_dtypes([kv_dtype])} is not {show_dtypes((*FLOATS, *FP8))}"
    return ""


def triton_serves(q: Tensor, k_cache: Tensor, *args: Any, **kwargs: Any) -> str:
    """Why the Triton kernel does not serve these arguments, or ""."""
    head_dim, group = q.size(3), q.size(2) // k_cache.size(2)
    if head_dim not in (64, 128, 256, 512):
        return f"head_dim {head_dim} is not 64, 128, 256 or 512"
    return f"{group} query heads a KV head are more than 64" if group > 64 else ""


register(
    SCHEMA,
    check=check,
    outputs=outputs,
    reference=reference,
    contents=contents,
    supports=supports,
    kernels=(cuda_kernel(NAME, "_attention"), triton_kernel(NAME, triton_serves), cpp_kernel(NAME)),
)
