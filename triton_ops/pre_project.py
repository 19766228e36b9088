"""pre_project: a GEMM split over K that gathers its rows (embeddings, then states), and a sum of the splits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gather import gathered_rows
from ._gemm import add_splits, block_columns, load_rows, load_weight, multiply, store_partial
from ._gemm_config import split_config
from ._launch import Launch
from ._wide_gemm_config import is_wide_split
from ._wide_gemm_split import wide_pre_project_launch

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
    launch = gather_launch(
        token_ids, embed_weight, embed_scale, state, weight, row_index=row_index, vocab_start=vocab_start
    )
    output = torch.empty(*token_ids.shape, weight.size(0), dtype=weight.dtype, device=weight.device)
    return [launch, add_splits_launch(launch.args["partials"], output)], output


def gather_launch(
    token_ids: Tensor, embed_weight: Tensor, embed_scale: float, state: Tensor | None, weight: Tensor, *,
    row_index: Tensor | None = None, vocab_start: int = 0
) -> Launch:
    """The splits' sums of the gathered rows' products into a workspace `partials` [rows, SPLITS, N], fp32."""
    batch, rows = token_ids.shape
    num_rows, backbone, columns = batch * rows, embed_weight.size(1), weight.size(0)
    if state is None:
        row_index = None
    gathered = {
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
        "rows": rows,
    }
    if is_wide_split(columns, backbone, embed_weight.element_size()):
        return wide_pre_project_launch(gathered, num_rows, backbone, weight)
    config = split_config(columns, backbone, embed_weight.element_size(), 1 if state is None else 2, gather=True)
    return Launch(
        pre_project_kernel,
        (triton.cdiv(num_rows, config.block_m(num_rows)), triton.cdiv(columns, config.block_n), config.splits),
        {
            **gathered, "weight": weight, "weight_stride": weight.stride(0),
            "partials": torch.empty(num_rows, config.splits, columns, dtype=torch.float32, device=weight.device),
            "num_rows": num_rows,
        },
        {
            "N": columns, "K": backbone, "SPLITS": config.splits, "BLOCKS": config.blocks_per_split,
            **config.constants(num_rows),
        },
        num_warps=config.slabs,
        num_stages=config.stages(num_rows, embed_weight.element_size()),
    )


def add_splits_launch(partials: Tensor, output: Tensor) -> Launch:
    """The sum of the splits in `partials` [rows, SPLITS, N] into `output` [.., N]."""
    num_rows, splits, columns = partials.shape
    grid = (num_rows, triton.cdiv(columns, SUM_COLUMNS))
    return Launch(
        add_splits_kernel,
        grid,
        {"partials": partials, "output": output},
        {"SPLITS": splits, "N": columns, "BLOCK_N": SUM_COLUMNS},
        num_warps=1,
    )


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

    x_rows, x_mask, scale = gathered_rows(
        token_ids, ids_stride0, ids_stride1, embed_weight, embed_stride, embed_scale, vocab_start, vocab, state,
        state_stride0, state_stride1, prev_rows, row_index, index_stride0, index_stride1, rows, row, row_mask,
        split >= SPLITS // 2
    )

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
