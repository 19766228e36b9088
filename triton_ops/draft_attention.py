"""draft_attention in Triton: the launches of a call, and the sizes of their tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ._attention_kernels import attend
from ._attention_merge import merge
from ._launch import Launch, capability, count_sms


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
    """Attention of the draft queries over the visible keys of each request, split by keys."""
    launches, output = plan(
        q, k_cache, v_cache, block_table, seq_lens, sm_scale, kv_indptr=kv_indptr, max_seq_len=max_seq_len,
        window_left=window_left, logits_soft_cap=logits_soft_cap, k_scale=k_scale, v_scale=v_scale,
        q_norm_weight=q_norm_weight, q_norm_eps=q_norm_eps, rope_inv_freq=rope_inv_freq, positions=positions,
        capability=capability(q.device), sms=count_sms(q.device),
    )
    for launch in launches:
        launch.run()
    return output


def plan(
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
    capability: int = 90,
    sms: int = 132,
) -> tuple[list[Launch], Tensor]:
    """The launches and the result that they write, on a GPU of compute capability `capability` / 10."""
    batch, rows, num_qo_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads = k_cache.shape[:3]
    bound = most_keys(k_cache, block_table, max_seq_len, window_left)
    if bound == 0 or q.numel() == 0:
        return [], q.new_zeros(q.shape)
    c = config(head_dim, rows, num_qo_heads, num_kv_heads, q.dtype, k_cache.dtype, capability)
    k_cache, v_cache = (_readable(cache, capability) for cache in (k_cache, v_cache))
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads = batch * rows * num_qo_heads
    blocks = batch * num_kv_heads * -(-rows // c.block_rows)
    chunks = count_chunks(bound, c)
    queries = min(rows, c.block_rows) * (num_qo_heads // num_kv_heads)
    keys = most_keys_a_chunk(bound, c)
    chunks_a_part, run = spread(blocks, chunks, keys, queries, sms, c)
    parts = -(-chunks // chunks_a_part)
    programs = -(-parts // run)
    alone = chunks_a_part == run == 1  # a chunk has a program of its own
    one_tile = alone and keys <= c.block_n
    # One part, if the table holds no more, is the result; else each leaves its sums.
    partial = q.new_empty((heads, parts, head_dim), dtype=torch.float32) if parts > 1 else output
    stats = q.new_empty((heads, parts, 2), dtype=torch.float32) if parts > 1 else None
    table = table_arguments(k_cache, block_table, seq_lens, kv_indptr, bound, c)
    main = Launch(
        attend,
        (blocks, programs),
        {
            "q_ptr": q, "k_ptr": k_cache, "v_ptr": v_cache, **table, "k_scale_ptr": k_scale, "v_scale_ptr": v_scale,
            "norm_ptr": q_norm_weight, "freq_ptr": rope_inv_freq, "positions_ptr": positions, "partial_ptr": partial,
            "stats_ptr": stats,
            **_strides("q", q, "batch", "row", "head"),
            **_strides("k", k_cache, "page", "slot", "head"),
            **_strides("v", v_cache, "page", "slot", "head"),
            "position_stride_batch": 0 if positions is None else positions.stride(0),
            "position_stride": 0 if positions is None or positions.dim() == 1 else positions.stride(1),
            "k_scale_stride": _scale_stride(k_scale),
            "v_scale_stride": _scale_stride(v_scale),
            "num_pages": num_pages, "parts": parts, "run": run,
            "rows": rows,
            "num_kv_heads": num_kv_heads,
            "group": num_qo_heads // num_kv_heads,
            "num_pairs": 0 if rope_inv_freq is None else rope_inv_freq.size(0),
            "sm_scale": float(sm_scale), "logits_soft_cap": float(logits_soft_cap), "eps": float(q_norm_eps),
        },
        {
            "HEAD_DIM": head_dim, "BLOCK_ROWS": c.block_rows, "BLOCK_GROUP": c.block_group, "BLOCK_N": c.block_n,
            "SLABS": c.slabs, "V_SLABS": c.v_slabs, "CHUNKS": chunks_a_part,
            "RUNS": run > 1,
            "LOG2_PAGE": page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1,
            "SOFT_CAP": logits_soft_cap > 0,
            "STAGES": c.stages if alone and blocks * programs <= c.at_once else
                      c.fold_stages if chunks_a_part > 1 else c.run_stages,
            "ONE_TILE": one_tile, "LATE": alone and not one_tile and c.late, "EARLY": False, "PREFETCH": False,
        },
        num_warps=c.num_warps,
    )
    if stats is None:
        return [main], output
    last = merge_launch(partial, stats, output, num_kv_heads, v_scale, table, c, chunks_a_part)
    return [main, last], output


def table_arguments(
    k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, kv_indptr: Tensor | None, bound: int, c: Config
) -> dict[str, Any]:
    """What kernels are told of a page table whose queries see at most `bound` keys, and of the chunks."""
    return {
        "table_ptr": block_table,
        "seq_lens_ptr": seq_lens,
        "kv_indptr_ptr": kv_indptr,
        "table_stride": block_table.stride(0) if kv_indptr is None else 0,
        "table_size": block_table.size(-1),
        "page_size": k_cache.size(1),
        "bound": bound,
        "max_chunks": c.max_chunks,
        "chunk_weight": c.chunk_weight,
    }


def merge_launch(
    partial: Tensor, stats: Tensor, output: Tensor, num_kv_heads: int, v_scale: Tensor | None, table: dict[str, Any],
    c: Config, chunks_a_part: int
) -> Launch:
    """The merge of `partial` [batch * rows * num_qo_heads, parts, head_dim] into `output`.

    A part of two folds is as one of twice as many chunks, of which there are half as many.
    """
    (heads, parts, head_dim), (rows, num_qo_heads) = partial.shape, output.shape[1:3]
    fold = max(c.fold, chunks_a_part)
    tile, num_warps = _merge_tile(heads, head_dim, parts, fold // chunks_a_part, 16 * c.fold // fold)
    return Launch(
        merge,
        (heads, head_dim // int(tile["BLOCK_D"])),
        {
            "partial_ptr": partial, "stats_ptr": stats, "out_ptr": output, **table, "v_scale_ptr": v_scale,
            "v_scale_stride": _scale_stride(v_scale), "parts": parts, "per_request": rows * num_qo_heads,
            "num_qo_heads": num_qo_heads, "group": num_qo_heads // num_kv_heads,
        },
        {
            "HEAD_DIM": head_dim, **tile, "MULTIPLE": c.block_n, "FOLD": fold, "CHUNKS": chunks_a_part,
            "EARLY": c.early,
        },
        num_warps=num_warps,
        early=c.early,
    )


def _merge_tile(
    heads: int, head_dim: int, parts: int, parts_a_fold: int, most: int = 16
) -> tuple[dict[str, int | bool], int]:
    """Constants and warps of the merge, which takes `most` folds at a time. They change no bit.

    Of few parts, or where there are many heads, a thread has all folds of its 4 elements; else the folds of a row lie
    side by side. Microseconds on an H200 of so few parts, and side by side: E4B 8 x 8192 1.7 and 3.2, the sliding
    layers of 31B 1 x 1024 1.7 and 2.2; in a step of 31B, 1 x 1024, 3.7 and 4.8, with 256 elements a program 4.5.

    Side by side, 32 elements of a row a program, and 64 or 128 in as many threads, which need fewer programs to be
    waiting when the last chunk ends. Attend and merge, in one process: 12B 1 x 8192 18.7 and 17.8, 31B 1 x 8192 28.7
    and 28.3, its 4 rows 34.0 and 31.3, 1 x 65536 134.90 and 134.79, 3 rows of E4B (12 heads) 1 x 8192 20.1 and 17.1;
    but E2B (4 heads) 1 x 8192 13.6 and 13.9, its 2 rows 13.9 and 14.2. 64 and 128, of four rows, 1 x 8192: 31B 28.5 and
    27.9, 12B 18.6 and 18.7, 26B-A4B 19.4 and 19.4; 12B 1 x 65536 49.4 and 49.0, one row of 4 x 8192 33.5 and 33.1.
    """
    group = min(most, power_of_two(-(-parts // parts_a_fold)))
    few = parts <= 16  # all are on their way at a time
    many_heads = heads * head_dim >= 65536
    wide = few or (many_heads and (parts_a_fold == 1 or group <= 4))
    side_by_side = 32 if heads < 12 else 64 if heads < 64 else 128
    block_d = min(head_dim, (512 if many_heads else 128) if wide else side_by_side)
    ahead = max(1, min(16 // parts_a_fold, group)) if wide else 1
    warps = block_d // 128 if wide else group * 32 // 128
    return {"BLOCK_D": block_d, "GROUP": group, "WIDE": wide, "AHEAD": ahead}, max(1, warps)


@lru_cache(maxsize=4096)
def spread(blocks: int, chunks: int, keys: int, queries: int, sms: int, c: Config) -> tuple[int, int]:
    """Chunks of so many keys a part, 1 or c.fold, and parts a program: of all ways the fastest. None changes a bit.

    Time, in keys: the waves of programs that a GPU has room for, each with what it takes to start (as long as 16384
    elements of K on an H200), times all that is moved, parts beside keys. Of the 28 shapes of
    bench/results/h200/tune_attention.json, with the tiles of that record, it takes the fastest way, or one within 2%,
    of all but two, of E4B: 8 requests x 1024 keys (2 chunks a program, 16.5 us instead of 15.2; but where no cache
    holds the keys 20.5 instead of 24.4), and the sliding layers of 64 requests (32 instead of 28.3; but a step, whose
    segments merge the parts, takes 478 instead of 484).
    """
    found = []
    for chunks_a_part in {1, c.fold} if chunks > 1 else {1}:
        parts = -(-chunks // chunks_a_part)
        # A part is written and read in fp32, 4 bytes an element of a query; a key has two vectors of 2 bytes.
        moved = 1 + 2 * queries / (keys * chunks_a_part) if parts > 1 else 1.0
        for run in range(1, parts + 1 if (c.folds_run if chunks_a_part > 1 else c.chunks_run) else 2):
            slots = sms * (c.folds_an_sm if chunks_a_part > 1 and run == 1 else c.an_sm)
            waves = -(-blocks * -(-parts // run) // slots)
            time = waves * (min(run * chunks_a_part, chunks) * keys + 16384 // c.head_dim) * moved
            found.append((time, chunks_a_part, run))
    _, chunks_a_part, run = min(found)
    return chunks_a_part, run


def most_keys(k_cache: Tensor, block_table: Tensor, max_seq_len: int, window_left: int) -> int:
    """The most keys that any request can see, known on the host."""
    num_pages, page_size = k_cache.shape[:2]
    bounds = [block_table.size(-1) * page_size if num_pages > 0 else 0, 2**31 - 1]
    bounds += [max_seq_len] if max_seq_len >= 0 else []
    bounds += [window_left + 1] if window_left >= 0 else []
    return min(bounds)


def count_chunks(bound: int, c: Config) -> int:
    """The most chunks that `chunk_size` of the kernels makes of up to `bound` keys.

    Of the largest chunks there are bound / keys. Fewer visible keys in smaller chunks, of m, may be more of them: up to
    m / chunk_weight, as they are at most m^2 / chunk_weight.
    """
    keys = most_keys_a_chunk(bound, c)
    smaller = math.ceil((keys - c.block_n) / c.chunk_weight)
    return max(1, min(c.max_chunks, max(-(-bound // keys), smaller)))


def most_keys_a_chunk(bound: int, c: Config) -> int:
    """The most keys that `chunk_size` of the kernels gives a chunk of up to `bound` keys."""
    keys = max(math.ceil(math.sqrt(bound * c.chunk_weight)), -(-bound // c.max_chunks), 1)
    return -(-keys // c.block_n) * c.block_n


@dataclass(frozen=True)
class Config:
    """Sizes of tiles, chunks and folds: from what one request is, never from how many there are."""

    head_dim: int
    block_rows: int  # rows and query heads of a KV head in a tile; their product is 8 to 64
    block_group: int
    block_n: int  # keys a tile; a chunk has whole tiles
    slabs: int  # of half a key, one or more warps each; 16 elements at least
    v_slabs: int  # of half a value: 1, or one a warp
    max_chunks: int  # a power of two
    chunk_weight: float  # a chunk has at least sqrt(chunk_weight * visible keys); a multiple of 1/8, exact in fp32
    fold: int  # chunks folded in order before the folds are merged; a power of two that is not above max_chunks
    num_warps: int
    stages: int  # 3: the next tile's K and V, and the pages of the one after it, are on the way; 5: two tiles; 7: three
    early: bool = False  # the merge may start before the chunks have ended: sm_90 and later
    # What follows changes no bit, and neither do the stages.
    late: bool = False  # a chunk's first tiles are asked for before its queries, which then take registers in the loop
    fold_stages: int = 3  # of programs that run folds
    run_stages: int = 3  # of programs that run several chunks, or are more than `at_once`
    at_once: int = 2**31  # programs for which an H200 has room with so many stages
    an_sm: int = 2  # programs for which an SM of Hopper has room
    folds_an_sm: int = 2  # where each runs one fold
    # Whether a program may run several: some tiles would need more registers than there are.
    chunks_run: bool = True
    folds_run: bool = True


@lru_cache(maxsize=256)
def config(
    head_dim: int,
    rows: int,
    num_qo_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    capability: int,
) -> Config:
    """Tiles that fit: at head_dim 512 in 16 bits 72 to 90 KB and up to 255 registers, so that two programs share an SM
    of Hopper; but up to 140 KB where there are no more programs than SMs.

    A part writes 4 bytes an element of each of its queries and reads 4 an element of each key: the more queries, the
    more keys it should have. Yet one request alone should give 128 to 256 programs where it has keys enough: an H200
    has 132 SMs.
    """
    group = num_qo_heads // num_kv_heads
    roomy = capability in (90, 100, 103)  # 227 KB of shared memory a block; elsewhere 99 KB have to do
    most = 64 if head_dim < 512 else 32  # queries; 64 do not fit in the registers
    if dtype == torch.float32 and head_dim > 128:
        most = 8
    block_group = power_of_two(group)
    block_rows = min(power_of_two(rows), max(1, most // block_group))
    block_group = max(block_group, 8 // block_rows)
    large = block_rows * block_group * head_dim >= 32 * 512
    # fp8 is converted in registers; fp32 has no tensor cores and is twice as wide.
    wide = kv_dtype != dtype or (dtype == torch.float32 and head_dim == 512)
    decoded = kv_dtype != dtype and capability < 89 and head_dim == 512  # by integer operations, in more registers
    short = dtype == torch.float32 or (not roomy and (large or decoded))
    num_warps = 8 if large or wide else 4
    plain = not (large or wide or short)
    tile = _plain_tile(head_dim, num_kv_heads, block_rows * block_group, roomy) if plain else None
    if large:  # one program an SM: 128 in all from 8192 keys on
        blocks = num_kv_heads * -(-rows // block_rows)
        max_chunks, chunk_weight = 128 // blocks, blocks * blocks / 2
    else:
        max_chunks, chunk_weight = 256 // num_kv_heads, min(2.0, num_kv_heads / 2)
    if tile is None:
        slabs = 4 if wide and dtype == torch.float16 else num_warps  # fp8 becomes fp16 in more registers
        fold, an_sm = (1, 1) if large else (8, 2)
        tile = _Tile(16 if short else 32, min(slabs, head_dim // 32), 3, fold, an_sm=an_sm)
        if large and roomy and not wide:
            # Microseconds of 4 rows of 31B on an H200, 1 x 8192 and 1 x 65536: 8 slabs 80 and 536, 2 slabs 59 and 341;
            # 1 slab, for which there are a few registers too few, 57 and 324, with two tiles on the way 51 and 297. (2
            # slabs with two tiles on the way are not timed.)
            tile = replace(tile, slabs=2, stages=5, run_stages=3)
    return Config(
        head_dim,
        block_rows,
        block_group,
        block_n=tile.block_n,
        slabs=tile.slabs,
        v_slabs=tile.v_slabs,
        max_chunks=max(8, power_of_two(tile.max_chunks or min(128, max_chunks))),
        chunk_weight=min(8.0, tile.chunk_weight or chunk_weight),
        fold=tile.fold,
        num_warps=num_warps,
        stages=tile.stages,
        early=capability >= 90,
        late=tile.late,
        fold_stages=tile.fold_stages or tile.stages,
        run_stages=tile.run_stages or tile.stages,
        at_once=tile.at_once,
        an_sm=tile.an_sm,
        folds_an_sm=tile.folds_an_sm or tile.an_sm,
        chunks_run=not (large and wide),
        folds_run=(tile.v_slabs == 1 or block_rows * block_group <= 8) and (dtype != torch.float32 or head_dim < 256),
    )


@dataclass(frozen=True)
class _Tile:
    """Of a Config; 0 for what follows from the number of heads, or from `stages`."""

    block_n: int
    slabs: int
    stages: int
    fold: int = 8
    fold_stages: int = 0
    run_stages: int = 0
    at_once: int = 2**31
    an_sm: int = 2
    folds_an_sm: int = 0
    chunk_weight: float = 0.0
    max_chunks: int = 0
    late: bool = False
    v_slabs: int = 1


def _plain_tile(head_dim: int, num_kv_heads: int, queries: int, roomy: bool) -> _Tile | None:
    """For 16-bit queries and caches, few queries a tile. None for a head_dim that was not measured.

    Microseconds of attend and merge on an H200 (bench/results/h200/tune_attention.json, requests x keys), with all of
    a row's chunks in programs of their own or all in folds, and as `spread` has them; before the merge was made faster:

        head_dim 512, 2 KV heads (E4B): 8 x 8192 76.5 and 76.5, 64 x 4096 268 and 261
        1 KV head, 4 query heads (E2B): 1 x 65536 60.3 in 128 chunks, 44.8 in 256; 8 x 8192 48.3 and 44.9,
            8 x 65536 322 and 259, 64 x 4096 143 and 146 (in folds of 8 chunks 140)
        1 KV head, 16 query heads (12B): 8 x 8192 74.0 and 65.4, 64 x 4096 203 and 197
        4 KV heads (31B): 8 x 1024 40.1 and 36.6, 64 x 4096 535 and 522
        head_dim 256, window 1024, 16 KV heads (31B): 8 x 8192 49.5 and 47.6
        8 KV heads (12B, 26B-A4B): 8 x 8192 35.0 and 27.6

    Since then, 8 queries: tiles of 16 keys, V in one slab, against tiles of 32, V in slabs as K is. Alone, 8 x 1024,
    8 x 8192, 64 x 4096: E2B 14.9, 45.3, 143 and 14.2, 44.6, 141; E4B 19.8, 74.7, 261 and 19.0, 73.7, 258; 31B 30.4,
    136.7, 518 and 29.6, 132.8, 513. A step of E2B, 1 x 8192, 69.1 and 64.6; of E4B, 1 x 8192, 1 x 65536, 8 x 8192,
    64 x 4096, 72.3, 128.5, 156.6, 473.2 and 70.4, 125.7, 154.8, 468.8; of 31B, 1 x 1024, 316.7 and, with two tiles on
    the way, 310.3. A thread has fewer keys to find there (load_tile), and finding them is most of its instructions.

    16 queries (12B), V in one slab (Hopper's wgmma, whose 16 columns 16 queries fill) and in 4: 1 x 65536 68.5 and
    60.8, 8 x 8192 72.8 and 69.1. Of the latter, folds of 4 chunks half as long: 8 x 8192 55.0, but 64 x 4096 227
    instead of 180, and 8 x 1024 22.9 instead of 20.0.
    """
    if head_dim == 512 and num_kv_heads <= 2 and queries <= 8:
        tile = _Tile(32, 4, 3, chunk_weight=0.5, v_slabs=4)
        return tile if num_kv_heads == 2 else replace(tile, fold=4, max_chunks=256)
    if head_dim == 512:
        weight = min(2.0, max(1.0, num_kv_heads / 2))
        if queries <= 8:
            tile = _Tile(32, 4, 5 if roomy else 3, fold_stages=3, run_stages=3, chunk_weight=weight, v_slabs=4)
            return replace(tile, at_once=132, late=True)
        tile = _Tile(16, 4, 7 if roomy else 5, fold_stages=5, run_stages=5, chunk_weight=weight)
        return replace(tile, at_once=132, v_slabs=4 if queries == 16 else 1)
    if head_dim == 256 and num_kv_heads > 2:
        tile = _Tile(32, 1, 5, fold_stages=3, run_stages=3, an_sm=3, folds_an_sm=4, max_chunks=128 // num_kv_heads,
                     late=True)
        return tile if num_kv_heads < 16 else replace(tile, fold_stages=5, folds_an_sm=3)
    if head_dim == 256:
        # Few short keys. Microseconds of E4B's step, batch 1 and 1024 keys, 8 and 8192, 64 and 4096: in one slab and
        # folds of 4 chunks 65.0, 183.3, 484.0; folds of 8 65.3, 182.8, 500.4; in two slabs 65.8, 184.6, 494.5.
        return _Tile(32, 1, 3, fold=4, an_sm=3, folds_an_sm=4)
    return None


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _strides(name: str, tensor: Tensor, *dims: str) -> dict[str, int]:
    return {f"{name}_stride_{dim}": stride for dim, stride in zip(dims, tensor.stride())}


def _scale_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else 1


def _readable(cache: Tensor, capability: int) -> Tensor:
    """fp8 as bytes where the GPU cannot convert it: the kernel then decodes them."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn and capability < 89 else cache
