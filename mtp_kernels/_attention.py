"""draft_attention by CUDA's kernels for heads of 256 or 512 elements (csrc/cuda/attend.cu, and frontier.cu for the many
queries of a tree's frontier) where they serve, else by Triton's.

Their blocks live as long as the launch and share what there is to read; Triton's merge follows, or a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._cuda_launch import CudaLaunch
from .triton_ops import draft_attention as triton_attention
from .triton_ops._launch import Launch, count_sms
from .triton_ops._launch import capability as capability_of

# The most rows times query heads of a KV head, by head_dim: of attend.cu, and of frontier.cu, which is Hopper's.
QUERIES = {256: 8, 512: 16}
FRONTIER = {512: 64}
# Of head_dim 256. Microseconds of a step of E4B (2 KV heads) on an H200 by this kernel and by Triton's: 1 x 8192 68.9
# and 66.1, 8 x 8192 144.2 and 141.0, 64 x 4096 435.9 and 444.0; of 31B (16) 64 x 4096 1631 and 1674, 1 x 1024 303.4 and
# 303.0.
LEAST_KV_HEADS = 4
START = 32  # keys of heads of 512 that an SM reads while a block starts
SERVED = (90, 100, 103)  # compute capabilities * 10, with 227 KB of shared memory a block
HOPPER = 90
MOST_PLACES = 2**32 - 1  # of 8 elements in a cache: the last number stands for none


def refuses(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    logits_soft_cap: float = 0.0,
    q_norm_weight: Tensor | None = None,
    capability: int | None = None,
    **unused: Any,
) -> str:
    """Why CUDA's kernel does not serve these arguments, or "": by sizes, strides, dtypes and the device alone."""
    found = capability_of(q.device) if capability is None else capability
    queries = q.size(1) * (q.size(2) // k_cache.size(2))
    if q.size(3) not in QUERIES:
        return f"head_dim {q.size(3)} is neither of {', '.join(map(str, QUERIES))}"
    if any(t.dtype != torch.bfloat16 for t in (q, k_cache, v_cache)):
        return "q and caches are not bf16"
    most = QUERIES[q.size(3)]
    if found == HOPPER:
        most = max(most, FRONTIER.get(q.size(3), 0))
    if queries > most:
        return f"{queries} queries of a KV head are more than {most}"
    if q.size(3) == 256 and k_cache.size(2) < LEAST_KV_HEADS:
        return f"{k_cache.size(2)} KV heads of 256 elements are fewer than {LEAST_KV_HEADS}"
    if logits_soft_cap > 0:
        return "logits_soft_cap"
    if q_norm_weight is not None and q_norm_weight.dtype != torch.bfloat16:
        return f"q_norm_weight of {q_norm_weight.dtype}"
    if k_cache.stride()[:2] != v_cache.stride()[:2]:
        return "caches with other strides each"
    if any(n % 8 for t in (q, k_cache, v_cache) for n in t.stride()[:3]):
        return "heads that are not multiples of 16 bytes apart"
    if sum((n - 1) * stride for n, stride in zip(k_cache.shape[:2], k_cache.stride())) // 8 >= MOST_PLACES:
        return "a cache of 64 GB or more"
    return "" if found in SERVED else f"compute capability {found / 10}"


def draft_attention(q: Tensor, *args: Any, **options: Any) -> Tensor:
    """The op, where `refuses` says nothing."""
    launches, output = _plan(q, *args, capability=capability_of(q.device), sms=count_sms(q.device), **options)
    for launch in launches:
        launch.run()
    return output


def plan(
    *args: Any, capability: int = 90, sms: int = 132, **options: Any
) -> tuple[Sequence[Launch | CudaLaunch], Tensor]:
    """As draft_attention.plan of Triton: the launches and the result that they write."""
    if refuses(*args, capability=capability, **options) or _native.cuda_library():
        return triton_attention.plan(*args, capability=capability, sms=sms, **options)
    return _plan(*args, capability=capability, sms=sms, **options)


def _plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, *args: Any, capability: int, sms: int,
    max_seq_len: int = -1, window_left: int = -1, **options: Any
) -> tuple[Sequence[Launch | CudaLaunch], Tensor]:
    """`plan` where `refuses` says nothing: what it does not look at may still want Triton's kernels."""
    bound = triton_attention.most_keys(k_cache, block_table, max_seq_len, window_left)
    aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (q, k_cache, v_cache, options.get("q_norm_weight")))
    if not aligned or bound == 0 or q.numel() == 0:
        return triton_attention.plan(q, k_cache, v_cache, block_table, *args, max_seq_len=max_seq_len,
                                     window_left=window_left, capability=capability, sms=sms, **options)
    return _launches(q, k_cache, v_cache, block_table, *args, bound=bound, capability=capability, sms=sms, **options)


def _launches(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, sm_scale: float, *, bound: int,
    capability: int, sms: int, kv_indptr: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, q_norm_weight: Tensor | None = None, q_norm_eps: float = 1e-6,
    rope_inv_freq: Tensor | None = None, positions: Tensor | None = None, logits_soft_cap: float = 0.0
) -> tuple[list[Launch | CudaLaunch], Tensor]:
    """The kernel and its merge, of queries that see `bound` keys at most; a soft cap is none."""
    batch, rows, num_qo_heads, head_dim = q.shape
    num_kv_heads = k_cache.size(2)
    queries = rows * (num_qo_heads // num_kv_heads)
    c = config(head_dim, rows, num_qo_heads, num_kv_heads, capability)
    chunks, keys = triton_attention.count_chunks(bound, c), triton_attention.most_keys_a_chunk(bound, c)
    chunks_a_part, column_blocks = spread(batch * num_kv_heads, chunks, keys, queries, sms, c)
    parts = -(-chunks // chunks_a_part)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads = batch * rows * num_qo_heads
    partial = q.new_empty((heads, parts, head_dim), dtype=torch.float32)
    stats = q.new_empty((heads, parts, 2), dtype=torch.float32)
    shared_by = num_kv_heads * column_blocks  # blocks, a part of the keys
    groups = max(1, sms * c.an_sm // shared_by)
    main = CudaLaunch("attend", {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens,
        "kv_indptr": kv_indptr, "k_scale": None if k_scale is None else k_scale.reshape(-1), "norm": q_norm_weight,
        "freq": rope_inv_freq, "positions": positions, "partial": partial, "stats": stats, "sm_scale": float(sm_scale),
        "eps": float(q_norm_eps), "bound": bound, "chunk_weight": c.chunk_weight, "max_chunks": c.max_chunks,
        "chunks_a_part": chunks_a_part, "folds_a_part": 2 if chunks_a_part > c.fold else 1,
        "column_blocks": column_blocks, "blocks": shared_by * min(groups, batch * parts), "early": False,
    })
    table = triton_attention.table_arguments(k_cache, block_table, seq_lens, kv_indptr, bound, c)
    last = triton_attention.merge_launch(partial, stats, output, num_kv_heads, v_scale, table, c, chunks_a_part)
    return [main, last], output


@lru_cache(maxsize=256)
def config(head_dim: int, rows: int, num_qo_heads: int, num_kv_heads: int, capability: int) -> triton_attention.Config:
    """Chunks and blocks, from what one request is.

    Chunks are short, as a block has many of them. An SM has room for two blocks of few queries, which is faster than
    one with twice the memory: microseconds on an H200 of E4B, 8 x 8192 and 64 x 4096, 75.1 and 264.1 with one, 73.4 and
    252.3 with two; of 31B (8 queries), 8 x 8192 and 1 x 65536, 134.8 and 134.6 with one, 127.9 and 128.5 with two.

    The chunk_weight of 8 queries, 4 KV heads (31B): 8 x 8192, 1 x 8192 and 64 x 4096 (in one fold a part) 127.8, 25.8
    and 519 with 0.5, 127.9, 26.1 and 509 with 2. 2 KV heads (26B-A4B): 8 x 8192 73.4 with 2, of which there are too few
    folds for all blocks; in folds half as long, as 0.5 makes them, 69.9.

    A frontier's parts are large, and one request alone should still give as many blocks as there are SMs. Microseconds
    of four rows, 1 x 8192 and 8 x 8192, with chunk_weight 2 (chunks of 128 keys) and 4 (256 keys): 31B (4 KV heads) 39,
    169 and 36, 150; 26B-A4B (2) 25, 91 (in folds of 8 instead of 4 chunks 82) and 27, 80; 12B (1) 24, 57 and 24, 62.
    """
    c = triton_attention.config(head_dim, rows, num_qo_heads, num_kv_heads, torch.bfloat16, torch.bfloat16, capability)
    queries = rows * (num_qo_heads // num_kv_heads)
    if queries > 16:
        weight, fold = (4.0, 4) if queries <= 32 and num_kv_heads > 2 else (2.0, 8)
        return replace(c, block_n=128, chunk_weight=weight, fold=fold, max_chunks=128, an_sm=1)
    few = queries <= 8
    if few and num_kv_heads == 1:
        fold, max_chunks = 4, 256
    else:
        fold, max_chunks = 8, max(8, triton_attention.power_of_two(256 // max(2, num_kv_heads)))
    keys = 32 if few and head_dim == 512 else 64  # of a tile; a chunk has whole tiles
    weight = 2.0 if head_dim == 512 and 4 < queries <= 8 and num_kv_heads > 2 else 0.5
    return replace(c, block_n=keys, chunk_weight=weight, fold=fold, max_chunks=max_chunks, an_sm=2 if few else 1)


@lru_cache(maxsize=4096)
def spread(blocks: int, chunks: int, keys: int, queries: int, sms: int, c: triton_attention.Config) -> tuple[int, int]:
    """Chunks of so many keys a part, and blocks that share its columns of values. Takes the fastest way.

    None changes a bit. Time, in keys: those of the SM that has the most parts, and START, times all that is moved,
    parts beside keys; but of two folds a part there are to be enough for all blocks of an SM. Microseconds on
    an H200 in one fold a part and in two: 64 x 4096, 12B 146.0 and 143.2, 26B-A4B 272 and 264, 31B 536 and 519; where
    half of the blocks would have no part, 31B 8 x 8192, 134.6 and 154.7.
    """
    found = []
    for way, shared_by in ways(chunks, queries, c):
        chunks_a_part = min(way, chunks)
        n = blocks * shared_by * -(-chunks // chunks_a_part)
        if way > c.fold and n <= sms * (c.an_sm - 1):
            continue
        each = -(-n // sms)
        # A part is written and read in fp32, 4 bytes an element of a query; a key has two vectors of 2 bytes, of which
        # two blocks read one and a half each.
        moved = (3 / 4 if shared_by == 2 else 1) + 2 * queries / (keys * chunks_a_part * shared_by)
        found.append(((each * chunks_a_part * keys + START) * moved, way, shared_by))
    return min(found)[1:]


def ways(chunks: int, queries: int, c: triton_attention.Config) -> list[tuple[int, int]]:
    """What there are kernels for: chunks of a part, which are one, a fold or two, and blocks that share it."""
    if queries > 32:
        return [(1, 1), (1, 2), *[(c.fold, 2)] * (chunks > 1)]
    two = chunks > c.fold and c.head_dim == 512 and 4 < queries <= 16
    return [(1, 1), *[(c.fold, 1)] * (chunks > 1), *[(2 * c.fold, 1)] * two]
