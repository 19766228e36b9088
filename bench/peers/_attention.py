"""What the attention peers share: their form, the expansion of a request into rows, checks, and scratch memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..case import Unsupported

Attend = Callable[[Tensor], Tensor]  # q [batch, rows, num_qo_heads, head_dim] -> the same shape


class MakeAttention(Protocol):
    """Prepares what an engine prepares ahead of a step; reads of lengths on the host are fine here, not in Attend.

    Args:
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim], with any strides that the peer can take.
        block_table, seq_lens: [batch, max_pages] int32, [batch] int32.
        rows: queries a request; engines run the request `rows` times.
        k_scale, v_scale: of an fp8 cache.
        q_dtype: None for the cache's, bf16 beside an fp8 cache.

    Raises:
        Unsupported: why the peer does not run this.
    """

    def __call__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        num_qo_heads: int,
        rows: int,
        window_left: int,
        sm_scale: float,
        max_seq_len: int,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        q_dtype: torch.dtype | None = None,
    ) -> Attend: ...


def expanded(block_table: Tensor, seq_lens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Table and lengths with each request `rows` times: [batch * rows, max_pages], [batch * rows], both int32."""
    return tuple(t.repeat_interleave(rows, 0).int().contiguous() for t in (block_table, seq_lens))  # type: ignore


def host_lengths(seq_lens: Tensor) -> list[int]:
    """The lengths of all requests; none may be 0, which the peers leave undefined."""
    lengths: list[int] = seq_lens.tolist()
    if not lengths or min(lengths) == 0:
        raise Unsupported("a request without keys")
    return lengths


def query_dtype(k_cache: Tensor, q_dtype: torch.dtype | None) -> torch.dtype:
    if q_dtype is not None:
        return q_dtype
    return torch.bfloat16 if is_fp8(k_cache) else k_cache.dtype


def is_fp8(cache: Tensor) -> bool:
    return cache.dtype == torch.float8_e4m3fn


def check_triton(k_cache: Tensor, q_dtype: torch.dtype) -> None:
    """Triton kernels run on a GPU, or with TRITON_INTERPRET=1; on a GPU they multiply fp32 as TF32."""
    if not k_cache.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported("its Triton kernels need a GPU")
    if k_cache.is_cuda and q_dtype == torch.float32:
        raise Unsupported("it multiplies fp32 as TF32")


_scratch: dict[tuple[torch.device, str], Tensor] = {}


def scratch(tag: str, *shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory that every call with this tag shares, as the layers of an engine do.

    Calls on one stream follow one another. Who got a smaller piece before keeps it.
    """
    wanted = torch.Size(shape).numel()
    held = _scratch.get((device, tag))
    if held is None or held.numel() < wanted:
        held = _scratch[device, tag] = torch.zeros(wanted, dtype=dtype, device=device)
    return held[:wanted].view(shape)
