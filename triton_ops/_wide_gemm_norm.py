"""The wide kernel of norm_linear, norm_geglu and post_project."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gemm import gelu_tanh, rms_scale
from ._launch import Launch
from ._rows import num_rows, row_arguments, row_offset
from ._wide_gemm import load_weights, load_x, multiply, row_squares, row_sums, store_columns, weight_pointers
from ._wide_gemm_config import shared_bytes, wide_config


def wide_norm_linear_launch(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, output: Tensor, *, gated: bool = False,
    normed: Tensor | None = None
) -> Launch:
    """norm_linear_launch for 16-bit dtypes and a wide K.

    In bf16 the row's scale is applied to the sums: x * norm_weight then needs no first pass over x, and its rounding
    has the same relative error, as bf16 has the range of fp32. fp16 has not, and `normed` needs the scale before.
    """
    rows, inner = num_rows(x), x.size(-1)
    columns = output.size(-1)
    config = wide_config(columns, gated, normed is not None)
    grid = (triton.cdiv(rows, config.rows(rows)), triton.cdiv(columns, config.block_n))
    return Launch(
        wide_norm_linear_kernel,
        grid,
        {
            "x": x, **row_arguments("x", x), "norm_weight": norm_weight, "eps": float(eps), "weight": weight,
            "weight_stride": weight.stride(0), "output": output, "normed": normed, "num_rows": rows,
        },
        {
            "N": columns, "K": inner, "GATED": gated, "SCALE_LAST": x.dtype == torch.bfloat16 and normed is None,
            **config.constants(rows),
        },
        num_warps=config.num_warps,
        num_stages=config.stages(rows, shared_bytes(x.device), 2 if gated else 1),
    )


@triton.jit(do_not_specialize=["x_size1", "x_size2", "num_rows"])
def wide_norm_linear_kernel(
    x, x_size1, x_size2, x_stride0, x_stride1, x_stride2, norm_weight, eps, weight, weight_stride, output, normed,
    num_rows, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, SCALE_LAST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Programs (ROWS rows, BLOCK_N columns)."""
    PARTS: tl.constexpr = 2 if GATED else 1  # of the weights: their products are needed in one place
    first = tl.program_id(1) * BLOCK_N
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_rows
    x_rows = x + row_offset(rows, x_size1, x_size2, x_stride0, x_stride1, x_stride2)  # [ROWS]
    weight_rows = weight_pointers(weight, weight_stride, first, N, BLOCK_N, PARTS)  # [PARTS * BLOCK_N]
    EVEN_K: tl.constexpr = K % BLOCK_K == 0

    columns = tl.arange(0, BLOCK_K)
    norm = tl.load(norm_weight + columns, mask=columns < K, other=0.0)

    if not SCALE_LAST:
        scale = rms_scale(row_squares(x_rows, row_mask, K, ROWS, BLOCK_K), eps, K)
    sums = tl.zeros([PARTS * BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + columns
        w = load_weights(weight_rows, k, K, EVEN_K)
        a = load_x(x_rows, row_mask, k, K, EVEN_K).to(tl.float32)
        next_norm = tl.load(norm_weight + k + BLOCK_K, mask=k + BLOCK_K < K, other=0.0)  # waits for no iteration
        if SCALE_LAST:
            squares += a * a
        else:
            a *= scale[:, None]
        a *= norm.to(tl.float32)[None, :]
        norm = next_norm
        sums = multiply(w, a, sums)
        if normed is not None:
            mask = (row_mask & (tl.program_id(1) == 0))[:, None] & (k < K)[None, :]
            tl.store(normed + rows.to(tl.int64)[:, None] * K + k[None, :], a, mask=mask)

    if SCALE_LAST:
        scale = rms_scale(row_sums(squares), eps, K)
        sums *= scale[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, BLOCK_N, ROWS]), [1, 2, 0]))  # each [BLOCK_N, ROWS]
        sums = gelu_tanh(gate) * up
    store_columns(output, N, sums, rows, row_mask, first + tl.arange(0, BLOCK_N), N, BLOCK_N)
