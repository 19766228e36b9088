"""pre_project: a GEMM split over K that gathers its rows (embeddings, then states), and a sum of the splits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gemm import add_splits, block_columns, load_rows, load_weight, multiply, store_partial
from ._gemm_config import split_config
from ._launch import Launch

SUM_COLUMNS = 128  # a program of the sum: one 16-byte load a thread and split


def pre_project(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> Tensor:
    launches, output = plan(
        token_ids, embed_weight, embed_scale, state, weight, row_index=row_index, vocab_start=vocab_start
    )
    for launch in launches:
        launch.run()
    return output


def plan(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> tuple[list[Launch], Tensor]:
    """The launches and the result that they write."""
    batch, rows = token_ids.shape
    num_rows, backbone, columns = batch * rows, embed_weight.size(1), weight.size(0)
    config = split_config(columns, backbone, embed_weight.element_size(), 1 if state is None else 2, gather=True)
    partials = torch.empty(num_rows, config.splits, columns, dtype=torch.float32, device=weight.device)
    output = torch.empty(batch, rows, columns, dtype=weight.dtype, device=weight.device)
    if state is None:
        row_index = None
    gather = Launch(
        pre_project_kernel,
        (triton.cdiv(num_rows, config.block_m(num_rows)), triton.cdiv(columns, config.block_n), config.splits),
        {
            "token_ids": token_ids, "ids_stride0": token_ids.stride(0), "ids_stride1": token_ids.stride(1),
            "embed_weight": embed_weight, "embed_stride": embed_weight.stride(0), "embed_scale": float(embed_scale),
            "vocab_start": vocab_start, "vocab": embed_weight.size(0),
            "state": state,
            "state_stride0": None if state is None else state.stride(0),
            "state_stride1": None if state is None else state.stride(1),
            "prev_rows": None if state is None else state.size(1),
            "row_index": row_index,
            "index_stride0": None if row_index is None else row_index.stride(0),
            "index_stride1": None if row_index is None else row_index.stride(1),
            "weight": weight, "weight_stride": weight.stride(0), "partials": partials, "rows": rows,
            "num_rows": num_rows,
        },
        {
            "N": columns, "K": backbone, "SPLITS": config.splits, "BLOCKS": config.blocks_per_split,
            **config.constants(num_rows),
        },
        num_warps=config.slabs,
        num_stages=config.stages(num_rows, embed_weight.element_size()),
    )
    add = Launch(
        add_splits_kernel,
        (num_rows, triton.cdiv(columns, SUM_COLUMNS)),
        {"partials": partials, "output": output},
        {"SPLITS": config.splits, "N": columns, "BLOCK_N": SUM_COLUMNS},
        num_warps=1,
    )
    return [gather, add], output


@triton.jit(do_not_specialize=["vocab_start", "vocab", "prev_rows", "rows", "num_rows", "ids_stride0",
                               "index_stride0"])
def pre_project_kernel(
    token_ids, ids_stride0, ids_stride1, embed_weight, embed_stride, embed_scale, vocab_start, vocab, state,
    state_stride0, state_stride1, prev_rows, row_index, index_stride0, index_stride1, weight, weight_stride, partials,
    rows, num_rows, N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLABS: tl.constexpr, SLAB_K: tl.constexpr
):
    """Programs (BLOCK_M rows, BLOCK_N columns, a split of BLOCKS blocks).

    K is the backbone: half of a row of weights. The first splits are of the embedding, as many others of the state.
    """
    EVEN_K: tl.constexpr = K % (SLABS * SLAB_K) == 0
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < num_rows
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    split = tl.program_id(2)
    weight_rows = weight + n.to(tl.int64) * weight_stride  # [BLOCK_N]
    part = split
    if state is not None:
        part = split % (SPLITS // 2)
        weight_rows += split // (SPLITS // 2) * K
    k = part * (BLOCKS * SLABS * SLAB_K) + block_columns(SLABS, SLAB_K)
    if BLOCKS == 1:
        w = load_weight(weight_rows, n_mask, k, K, EVEN_N, EVEN_K)  # does not wait for the ids

    request, place = (row // rows).to(tl.int64), row % rows
    ids = tl.load(token_ids + request * ids_stride0 + place * ids_stride1, mask=row_mask, other=-1).to(tl.int64)
    # The difference can wrap around only where the first condition is false already.
    x_mask = (ids >= vocab_start) & (ids - vocab_start < vocab) & row_mask
    x_rows = embed_weight + tl.where(x_mask, ids - vocab_start, 0) * embed_stride  # [BLOCK_M]
    scale = embed_scale
    if state is not None:
        source = place.to(tl.int64)
        if row_index is not None:
            pointers = row_index + request * index_stride0 + place * index_stride1
            source = tl.load(pointers, mask=row_mask, other=0).to(tl.int64)
            source = tl.minimum(tl.maximum(source, 0), prev_rows.to(tl.int64) - 1)
        in_state = split >= SPLITS // 2
        x_rows = tl.where(in_state, state + request * state_stride0 + source * state_stride1, x_rows)
        x_mask = tl.where(in_state, row_mask, x_mask)
        scale = tl.where(in_state, 1.0, scale)  # 1 changes no bit

    sums = tl.zeros([SLABS, BLOCK_M, BLOCK_N], tl.float32)
    if BLOCKS == 1:
        x = load_rows(x_rows, x_mask, k, K, EVEN_K).to(tl.float32) * scale
        sums = multiply(x, w, sums)
    else:
        for _ in range(BLOCKS):
            w = load_weight(weight_rows, n_mask, k, K, EVEN_N, EVEN_K)
            x = load_rows(x_rows, x_mask, k, K, EVEN_K).to(tl.float32) * scale
            sums = multiply(x, w, sums)
            k += SLABS * SLAB_K
    store_partial(partials, sums, num_rows, split, SPLITS, N, BLOCK_M, BLOCK_N)


@triton.jit
def add_splits_kernel(partials, output, SPLITS: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Programs (a row, BLOCK_N columns)."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < N
    y = add_splits(partials, row, n, mask, SPLITS, N)
    tl.store(output + row.to(tl.int64) * N + n, y, mask=mask)
