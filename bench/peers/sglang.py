"""SGLang's Triton decode attention and its tree functions, from its own files (written for SGLang 0.5.23)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..case import Unsupported
from ._attention import Attend, check_triton, expanded, host_lengths, query_dtype, scratch
from ._wheel import load_modules

FOLDER = "sglang/kernels/ops/attention"
MODULES = (f"{FOLDER}/score_mod.py", f"{FOLDER}/decode_attention.py")


def load(root: Path) -> ModuleType:
    """The decode attention module from its files under `root`."""

    class Environment:  # every switch is off
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(get=lambda: False)

    def no() -> bool:
        return False

    stubs: dict[str, dict[str, Any]] = {
        "sglang.srt.environ": {"envs": Environment()},
        "sglang.srt.utils": {
            "get_device_core_count": lambda i=0: torch.cuda.get_device_properties(i).multi_processor_count,
            "is_gfx95_supported": no,
            "is_gfx1250_supported": no,
            "is_hip": no,
        },
    }
    return load_modules(root, MODULES, stubs)[-1]


def attention(
    module: ModuleType,
    splits: int,
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
) -> Attend:
    """MakeAttention, given SGLang's module and the number of parts that a request's keys are split into.

    SGLang has a table of slots, not of pages, and cuts that of a sliding layer to the window.
    """
    check_triton(k_cache, query_dtype(k_cache, q_dtype))
    pools = [slots(cache) for cache in (k_cache, v_cache)]
    device, head_dim = k_cache.device, k_cache.size(3)
    indptr, indices = slot_lists(*expanded(block_table, seq_lens, rows), k_cache.size(1), window_left)
    num_queries = indptr.numel() - 1
    partial = scratch("sglang-out", num_queries, num_qo_heads, splits, head_dim, device=device)
    lse = scratch("sglang-lse", num_queries, num_qo_heads, splits, device=device)
    num_splits = torch.full((num_queries,), splits, dtype=torch.int32, device=device)

    def attend(q: Tensor) -> Tensor:
        queries = q.flatten(0, 1)  # [batch * rows, num_qo_heads, head_dim]
        result = torch.empty_like(queries)
        module.decode_attention_fwd(
            queries, *pools, result, indptr, indices, partial, lse, num_splits, splits, sm_scale, k_scale, v_scale
        )
        return result.view(q.shape)

    return attend


def slots(cache: Tensor) -> Tensor:
    """The cache as SGLang's pool [num_pages * page_size, num_kv_heads, head_dim], without a copy."""
    if cache.stride(0) != cache.size(1) * cache.stride(1) or cache.stride(3) != 1:
        raise Unsupported("SGLang's pool has one stride from slot to slot: NHD pages that follow one another")
    return cache.view(-1, *cache.shape[2:])


def slot_lists(tables: Tensor, lengths: Tensor, page_size: int, window_left: int) -> tuple[Tensor, Tensor]:
    """kv_indptr [n + 1] int32 and kv_indices int64 of the visible keys: the last window_left + 1 of each request."""
    lists = []
    for table, length in zip(tables.long(), host_lengths(lengths)):
        first = max(0, length - window_left - 1) if window_left >= 0 else 0
        key = torch.arange(first, length, device=tables.device)
        lists.append(table[key // page_size] * page_size + key % page_size)
    counts = torch.tensor([0, *(part.numel() for part in lists)], device=tables.device)
    return counts.cumsum(0).int(), torch.cat(lists)
