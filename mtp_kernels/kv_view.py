"""KVView: one layer type's KV of the target, as draft_attention reads it, whoever keeps it and in whatever layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .ops._checks import (
    FLOATS,
    FP8,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_range,
    check_rank,
    check_shape,
    require,
)
from .ops._paged_kv import check_caches, check_table

LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True, eq=False)
class KVView:
    """A paged, read-only view of the committed keys of a batch: caches, page table, lengths, window and scales.

    Make one with `paged`, `ragged` or `dense`, which check their arguments and never copy a cache. Each layer type has
    a view of its own. A view holds the caller's tensors: lengths and tables may be written in place between rounds (a
    captured graph sees the new values), or `with_seq_lens` gives a view with others.

    >>> k, v = torch.randn(2, 10, 16, 2, 64).unbind()  # each [num_pages, page_size, num_kv_heads, head_dim]
    >>> table, seq_lens = torch.tensor([[3, 1, 7], [2, 0, -1]]), torch.tensor([40, 20])
    >>> kv = KVView.paged(k, v, table, seq_lens, window_left=15)
    >>> kv.batch, kv.page_size, kv.num_kv_heads, kv.head_dim
    (2, 16, 2, 64)
    >>> kv.attend(torch.randn(2, 1, 4, 64), 1.0).shape
    torch.Size([2, 1, 4, 64])
    """

    k_cache: Tensor  # [num_pages, page_size, num_kv_heads, head_dim], any strides with a contiguous last dimension
    v_cache: Tensor  # the same shape and dtype, strides of its own
    block_table: Tensor  # [batch, max_pages], or flat beside kv_indptr
    seq_lens: Tensor  # [batch], committed keys that the table lists
    kv_indptr: Tensor | None = None  # [batch + 1], in table entries
    max_seq_len: int = -1  # the caller's promise that no length is greater; -1 for none
    window_left: int = -1  # visible keys before the last one; negative for all
    k_scale: Tensor | None = None  # fp32, one element or [num_kv_heads]
    v_scale: Tensor | None = None

    @classmethod
    def paged(
        cls,
        k: Tensor,
        v: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        window_left: int = -1,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        max_seq_len: int = -1,
        layout: str = "NHD",
    ) -> KVView:
        """A paged cache with one row of the table a request, as vLLM has it.

        Args:
            k, v: [num_pages, page_size, num_kv_heads, head_dim] ("NHD"), or [num_pages, num_kv_heads, page_size,
                head_dim] ("HND"); each with its own strides, so halves of an interleaved cache are fine: `cache[:, 0]`
                and `cache[:, 1]` of [num_pages, 2, ...], or `cache[0]` and `cache[1]`. bf16, fp16, fp32, or
                float8_e4m3fn with scales.
            block_table: [batch, max_pages] int32 or int64. Entries without a visible key may hold anything.
            seq_lens: [batch] int32 or int64, keys that the table lists.
            window_left: visible keys before the last one; negative for all. Engines differ: W for transformers, W - 1
                for vLLM and SGLang, where W is the model's sliding_window.
            k_scale, v_scale: fp32, one element or [num_kv_heads]; required for fp8.
            max_seq_len: a promise that no length is greater; -1 for none.
            layout: "NHD" or "HND", the order of the caches' dimensions.

        Raises:
            ArgumentError: a wrong rank, size, dtype, stride or device, or a missing scale.

        >>> hnd = torch.zeros(10, 2, 16, 64)  # [num_pages, num_kv_heads, page_size, head_dim]
        >>> KVView.paged(hnd, hnd, torch.zeros(1, 4, dtype=torch.int32), torch.tensor([50]), layout="HND").page_size
        16
        """
        where = "KVView.paged"
        check_rank(where, "k", k, 4)
        k, v = _as_nhd(where, k, v, layout)
        check_rank(where, "seq_lens", seq_lens, 1)
        view = cls(k, v, block_table, seq_lens, None, max_seq_len, window_left, k_scale, v_scale)
        return view._checked(where)

    @classmethod
    def ragged(
        cls,
        k: Tensor,
        v: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        seq_lens: Tensor,
        window_left: int = -1,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        max_seq_len: int = -1,
        layout: str = "NHD",
    ) -> KVView:
        """A paged cache with the pages of all requests in one list, as FlashInfer and SGLang have it.

        Args:
            k, v: as for `paged`; or [num_tokens, num_kv_heads, head_dim], a token pool: then a page is one token.
            kv_indptr: [batch + 1] int32 or int64; request b's pages are kv_indices[kv_indptr[b] : kv_indptr[b + 1]].
            kv_indices: [num_entries] int32 or int64, page ids; may be longer than the last request's end.
            seq_lens: [batch] int32 or int64, keys that the request's pages hold.
            max_seq_len: a promise that no length is greater. Worth giving: without one, each request is taken to be
                as long as all of `kv_indices`.
            window_left, k_scale, v_scale, layout: as for `paged`; a token pool has no layout.

        Raises:
            ArgumentError: a wrong rank, size, dtype, stride or device, or a missing scale.

        >>> pool = torch.zeros(100, 2, 64)  # [num_tokens, num_kv_heads, head_dim]
        >>> indptr, indices = torch.tensor([0, 2, 5]), torch.tensor([17, 4, 99, 0, 1])
        >>> kv = KVView.ragged(pool, pool, indptr, indices, torch.tensor([2, 3]))
        >>> kv.batch, kv.page_size
        (2, 1)
        """
        where = "KVView.ragged"
        check_rank(where, "k", k, 3, 4)
        k, v = _as_nhd(where, k, v, layout)
        check_rank(where, "seq_lens", seq_lens, 1)
        view = cls(k, v, kv_indices, seq_lens, kv_indptr, max_seq_len, window_left, k_scale, v_scale)
        return view._checked(where, table_name="kv_indices")

    @classmethod
    def dense(
        cls,
        k: Tensor,
        v: Tensor,
        seq_lens: Tensor | None = None,
        window_left: int = -1,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> KVView:
        """One contiguous cache a request, as transformers has it; each request is one page.

        Args:
            k, v: [batch, num_kv_heads, length, head_dim].
            seq_lens: [batch] int32 or int64, the first keys of each request that count; None for all `length` of them.
            window_left, k_scale, v_scale: as for `paged`.

        Raises:
            ArgumentError: a wrong rank, size, dtype, stride or device, or a missing scale.

        >>> k, v = torch.randn(2, 3, 1, 10, 64).unbind()
        >>> kv = KVView.dense(k, v)
        >>> kv.batch, kv.page_size, kv.seq_lens.tolist(), kv.k_cache.data_ptr() == k.data_ptr()
        (3, 10, [10, 10, 10], True)
        """
        where = "KVView.dense"
        check_rank(where, "k", k, 4)
        batch, _, length, _ = k.shape
        k, v = _as_nhd(where, k, v, "HND")
        if seq_lens is None:
            seq_lens = torch.full((batch,), length, dtype=torch.int32, device=k.device)
        check_shape(where, "seq_lens", seq_lens, (batch,), f"batch of k is {batch}")
        table = torch.arange(batch, dtype=torch.int32, device=k.device).unsqueeze(1)
        view = cls(k, v, table, seq_lens, None, length, window_left, k_scale, v_scale)
        return view._checked(where)

    def attend(
        self,
        q: Tensor,
        sm_scale: float,
        *,
        q_norm_weight: Tensor | None = None,
        q_norm_eps: float = 1e-6,
        rope_inv_freq: Tensor | None = None,
        positions: Tensor | None = None,
        logits_soft_cap: float = 0.0,
    ) -> Tensor:
        """`torch.ops.mtp.draft_attention` of q [batch, rows, num_qo_heads, head_dim] over this view."""
        return torch.ops.mtp.draft_attention(
            q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            sm_scale,
            kv_indptr=self.kv_indptr,
            max_seq_len=self.max_seq_len,
            window_left=self.window_left,
            logits_soft_cap=logits_soft_cap,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            q_norm_weight=q_norm_weight,
            q_norm_eps=q_norm_eps,
            rope_inv_freq=rope_inv_freq,
            positions=positions,
        )

    def with_seq_lens(self, seq_lens: Tensor, max_seq_len: int | None = None) -> KVView:
        """The same caches and table with other lengths; `max_seq_len` None keeps the promise made before."""
        promise = self.max_seq_len if max_seq_len is None else max_seq_len
        return replace(self, seq_lens=seq_lens, max_seq_len=promise)._checked("KVView.with_seq_lens", self.batch)

    @property
    def batch(self) -> int:
        return self.seq_lens.size(0)

    @property
    def page_size(self) -> int:
        return self.k_cache.size(1)

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.size(2)

    @property
    def head_dim(self) -> int:
        return self.k_cache.size(3)

    @property
    def dtype(self) -> torch.dtype:
        """Of the caches."""
        return self.k_cache.dtype

    @property
    def device(self) -> torch.device:
        return self.k_cache.device

    def _checked(self, where: str, batch: int | None = None, table_name: str = "block_table") -> KVView:
        """This view, once what draft_attention will ask of it holds; errors use the names of method `where`."""
        check_dtype(where, "k", self.k_cache, (*FLOATS, *FP8))
        require(self.head_dim % 2 == 0, where, "k", "an even head_dim", self.head_dim)
        check_caches(where, self.k_cache, self.v_cache, self.k_scale, self.v_scale, "k", "v")
        batch = self.batch if batch is None else batch
        why = f"batch of seq_lens is {batch}"
        check_table(where, self.block_table, self.seq_lens, self.kv_indptr, batch, why, table_name)
        check_range(where, "max_seq_len", self.max_seq_len, -1)
        check_device(
            where, self.device, "k", v=self.v_cache, **{table_name: self.block_table}, seq_lens=self.seq_lens,
            kv_indptr=self.kv_indptr, k_scale=self.k_scale, v_scale=self.v_scale,
        )
        return self


def _as_nhd(where: str, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Views [num_pages, page_size, num_kv_heads, head_dim] of both caches; a token pool has one token a page."""
    require(layout in LAYOUTS, where, "layout", "'NHD' or 'HND'", repr(layout))
    check_shape(where, "v", v, tuple(k.shape), "the shape of k")
    check_last_contiguous(where, k=k, v=v)
    if k.dim() == 3:
        return k.unsqueeze(1), v.unsqueeze(1)
    return (k.transpose(1, 2), v.transpose(1, 2)) if layout == "HND" else (k, v)
