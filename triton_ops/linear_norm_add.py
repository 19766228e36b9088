"""linear_norm_add: a GEMM split over K, then one program a row that adds the splits, norms and adds the residual."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gemm import add_splits, block_columns, load_rows, load_weight, multiply, norm_add, store_partial
from ._gemm_config import power_of_2, split_config
from ._launch import Launch
from ._rows import num_rows, row_arguments, row_offset
from ._wide_gemm_config import is_wide_split
from ._wide_gemm_split import wide_partial_launch


def linear_norm_add(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> Tensor:
    launches, output = plan(x, weight, norm_weight, eps, residual, scale=scale)
    for launch in launches:
        launch.run()
    return output


def plan(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> tuple[list[Launch], Tensor]:
    """The launches and the result that they write."""
    output = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    launches = []
    if weight is not None:
        launches.append(partial_launch(x, weight))
        x = launches[0].args["partials"]
    launches.append(norm_add_launch(x, norm_weight, eps, residual, output, scale=scale, split=weight is not None))
    return launches, output


def partial_launch(x: Tensor, weight: Tensor) -> Launch:
    """The splits' sums of x @ weight.T into a workspace `partials` [rows, SPLITS, N], fp32."""
    rows, inner, columns = num_rows(x), x.size(-1), weight.size(0)
    if is_wide_split(columns, inner, x.element_size()):
        return wide_partial_launch(x, weight)
    config = split_config(columns, inner, x.element_size())
    return Launch(
        partial_kernel,
        (triton.cdiv(rows, config.block_m(rows)), triton.cdiv(columns, config.block_n), config.splits),
        {
            "x": x, **row_arguments("x", x), "weight": weight, "weight_stride": weight.stride(0),
            "partials": torch.empty(rows, config.splits, columns, dtype=torch.float32, device=x.device),
            "num_rows": rows,
        },
        {
            "N": columns, "K": inner, "SPLITS": config.splits, "BLOCKS": config.blocks_per_split,
            **config.constants(rows),
        },
        num_warps=config.slabs,
        num_stages=config.stages(rows, x.element_size()),
    )


def norm_add_launch(
    projected: Tensor, norm_weight: Tensor, eps: float, residual: Tensor, output: Tensor, *,
    scale: Tensor | None = None, split: bool = False
) -> Launch:
    """(residual + rmsnorm(projected) * norm_weight) * scale into `output`.

    With `split`, `projected` are partials [rows, SPLITS, N] to be added first.
    """
    rows, columns = num_rows(residual), norm_weight.size(0)
    source: dict[str, Any] = {"partials": None, "x": projected, **row_arguments("x", residual if split else projected)}
    if split:
        source = dict.fromkeys(source) | {"partials": projected}
    block = power_of_2(columns)
    warps = min(16, max(1, block // 256))
    return Launch(
        norm_add_kernel,
        (rows if columns else 0,),
        {
            **source, "norm_weight": norm_weight, "eps": float(eps), "residual": residual,
            **row_arguments("residual", residual), "scale": scale, "output": output,
        },
        {
            "SPLITS": projected.size(1) if split else 0, "N": columns, "BLOCK_N": block,
        },
        num_warps=warps,
    )


@triton.jit(do_not_specialize=["x_size1", "x_size2", "num_rows"])
def partial_kernel(
    x, x_size1, x_size2, x_stride0, x_stride1, x_stride2, weight, weight_stride, partials, num_rows, N: tl.constexpr,
    K: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLABS: tl.constexpr, SLAB_K: tl.constexpr
):
    """Programs (BLOCK_M rows, BLOCK_N columns, a split of BLOCKS blocks of K)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    split = tl.program_id(2)
    x_rows = x + row_offset(rows, x_size1, x_size2, x_stride0, x_stride1, x_stride2)  # [BLOCK_M]
    weight_rows = weight + n.to(tl.int64) * weight_stride  # [BLOCK_N]
    EVEN_K: tl.constexpr = K % (SLABS * SLAB_K) == 0
    EVEN_N: tl.constexpr = N % BLOCK_N == 0

    sums = tl.zeros([SLABS, BLOCK_M, BLOCK_N], tl.float32)
    k = split * (BLOCKS * SLABS * SLAB_K) + block_columns(SLABS, SLAB_K)
    for _ in range(BLOCKS):
        w = load_weight(weight_rows, n_mask, k, K, EVEN_N, EVEN_K)
        sums = multiply(load_rows(x_rows, row_mask, k, K, EVEN_K), w, sums)
        k += SLABS * SLAB_K
    store_partial(partials, sums, num_rows, split, SPLITS, N, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["x_size1", "x_size2", "residual_size1", "residual_size2"])
def norm_add_kernel(
    partials, x, x_size1, x_size2, x_stride0, x_stride1, x_stride2, norm_weight, eps, residual, residual_size1,
    residual_size2, residual_stride0, residual_stride1, residual_stride2, scale, output, SPLITS: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Programs (a row). The projection is the sum of a row's `partials`, or `x` where that is projected already."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    mask = n < N
    if SPLITS > 0:
        projected = add_splits(partials, row, n, mask, SPLITS, N)
    else:
        x_row = x + row_offset(row, x_size1, x_size2, x_stride0, x_stride1, x_stride2)
        projected = tl.load(x_row + n, mask=mask, other=0.0).to(tl.float32)
    residual_row = residual + row_offset(row, residual_size1, residual_size2, residual_stride0, residual_stride1,
                                         residual_stride2)
    y = norm_add(projected, n, mask, norm_weight, eps, residual_row, scale, N)
    tl.store(output + row.to(tl.int64) * N + n, y, mask=mask)
