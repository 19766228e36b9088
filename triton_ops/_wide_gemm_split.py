"""The wide kernels whose sums over K are split among programs: linear_norm_add and pre_project."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gather import gathered_rows
from ._launch import Launch
from ._rows import num_rows, row_arguments, row_offset
from ._wide_gemm import load_weights, load_x, multiply, store_columns, weight_pointers
from ._wide_gemm_config import shared_bytes, wide_split_config


def wide_partial_launch(x: Tensor, weight: Tensor) -> Launch:
    """partial_launch for 16-bit dtypes, a wide K and many columns."""
    rows = num_rows(x)
    arguments = {"x": x, **row_arguments("x", x)}
    return _split_launch(wide_partial_kernel, arguments, rows, x.size(-1), 1, weight)


def wide_pre_project_launch(
    gathered: dict[str, Any], num_rows: int, backbone: int, weight: Tensor
) -> Launch:
    """The gather and the product of pre_project; `gathered` are the arguments that say where the rows are."""
    parts = 1 if gathered["state"] is None else 2
    return _split_launch(wide_pre_project_kernel, gathered, num_rows, backbone, parts, weight)


def _split_launch(
    kernel: Any, arguments: dict[str, Any], rows: int, inner: int, parts: int, weight: Tensor
) -> Launch:
    """Writes the splits' sums into a workspace `partials` [rows, SPLITS, N], fp32."""
    columns = weight.size(0)
    config = wide_split_config(columns, inner, parts)
    grid = (triton.cdiv(rows, config.rows(rows)), triton.cdiv(columns, config.block_n), config.splits)
    return Launch(
        kernel,
        grid,
        {
            **arguments, "weight": weight, "weight_stride": weight.stride(0),
            "partials": torch.empty(rows, config.splits, columns, dtype=torch.float32, device=weight.device),
            "num_rows": rows,
        },
        {
            "N": columns, "K": inner, "SPLITS": config.splits, "BLOCKS": config.blocks_per_split,
            **config.constants(rows),
        },
        num_warps=config.num_warps,
        num_stages=config.stages(rows, shared_bytes(weight.device)),
    )


@triton.jit(do_not_specialize=["x_size1", "x_size2", "num_rows"])
def wide_partial_kernel(
    x, x_size1, x_size2, x_stride0, x_stride1, x_stride2, weight, weight_stride, partials, num_rows,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Programs (ROWS rows, BLOCK_N columns, a split of at most BLOCKS blocks of K)."""
    split = tl.program_id(2)
    first_k = split * (BLOCKS * BLOCK_K)
    last_k = tl.minimum(first_k + BLOCKS * BLOCK_K, K)
    first = tl.program_id(1) * BLOCK_N

    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_rows
    n = first + tl.arange(0, BLOCK_N)
    x_rows = x + row_offset(rows, x_size1, x_size2, x_stride0, x_stride1, x_stride2)  # [ROWS]
    weight_rows = weight_pointers(weight, weight_stride, first, N, BLOCK_N, 1)  # [BLOCK_N]
    EVEN_K: tl.constexpr = K % BLOCK_K == 0

    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(first_k, last_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_weights(weight_rows, k, K, EVEN_K)
        sums = multiply(w, load_x(x_rows, row_mask, k, K, EVEN_K), sums)
    store_columns(partials + split * N, SPLITS * N, sums, rows, row_mask, n, N, BLOCK_N)


@triton.jit(do_not_specialize=["vocab_start", "vocab", "prev_rows", "rows", "num_rows", "ids_stride0", "index_stride0"])
def wide_pre_project_kernel(
    token_ids, ids_stride0, ids_stride1, embed_weight, embed_stride, embed_scale, vocab_start, vocab, state,
    state_stride0, state_stride1, prev_rows, row_index, index_stride0, index_stride1, weight, weight_stride, partials,
    rows, num_rows, N: tl.constexpr, K: tl.constexpr,
    SPLITS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Programs (ROWS rows, BLOCK_N columns, a split of at most BLOCKS blocks).

    K is the backbone: half of a row of weights. The first splits are of the embedding, as many others of the state.
    """
    split = tl.program_id(2)
    part, in_state = split, False
    part_k = 0  # column of the weights where this half begins
    if state is not None:
        in_state = split >= SPLITS // 2
        part = split % (SPLITS // 2)
        part_k = split // (SPLITS // 2) * K
    first_k = part * (BLOCKS * BLOCK_K)
    last_k = tl.minimum(first_k + BLOCKS * BLOCK_K, K)
    first = tl.program_id(1) * BLOCK_N

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    n = first + tl.arange(0, BLOCK_N)
    weight_rows = weight_pointers(weight, weight_stride, first, N, BLOCK_N, 1) + part_k  # [BLOCK_N]
    EVEN_K: tl.constexpr = K % BLOCK_K == 0

    x_rows, x_mask, scale = gathered_rows(
        token_ids, ids_stride0, ids_stride1, embed_weight, embed_stride, embed_scale, vocab_start, vocab, state,
        state_stride0, state_stride1, prev_rows, row_index, index_stride0, index_stride1, rows, row, row_mask, in_state
    )
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(first_k, last_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_weights(weight_rows, k, K, EVEN_K)
        sums = multiply(w, load_x(x_rows, x_mask, k, K, EVEN_K).to(tl.float32) * scale, sums)
    store_columns(partials + split * N, SPLITS * N, sums, row, row_mask, n, N, BLOCK_N)
