"""norm_linear, and the kernel that it shares with norm_geglu and post_project."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._gemm import (
    block_columns,
    gelu_tanh,
    load_rows,
    load_vector,
    load_weight,
    multiply,
    rms_scale,
    row_rms_scale,
)
from ._gemm_config import whole_config
from ._launch import Launch
from ._rows import num_rows, row_arguments, row_offset
from ._wide_gemm_config import is_wide
from ._wide_gemm_norm import wide_norm_linear_launch


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    launches, output = plan(x, norm_weight, eps, weight)
    for launch in launches:
        launch.run()
    return output


def plan(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[list[Launch], Tensor]:
    """The launches and the result that they write."""
    output = x.new_empty((*x.shape[:-1], weight.size(0)))
    return [norm_linear_launch(x, norm_weight, eps, weight, output)], output


def norm_linear_launch(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, output: Tensor, *, gated: bool = False,
    normed: Tensor | None = None
) -> Launch:
    """rmsnorm(x) * norm_weight @ weight.T into `output`.

    `gated`: gelu_tanh of the product with the first half of `weight`, times that with the second half. With `normed`,
    the normed rows go there too, and the product is of the rounded ones.
    """
    rows, inner = num_rows(x), x.size(-1)
    if is_wide(inner, x.element_size()):
        return wide_norm_linear_launch(
            x, norm_weight, eps, weight, output, gated=gated, normed=normed
        )
    config = whole_config(inner, x.element_size(), gated or normed is not None)
    return Launch(
        norm_linear_kernel,
        (triton.cdiv(rows, config.block_m(rows)), triton.cdiv(output.size(-1), config.block_n)),
        {
            "x": x, **row_arguments("x", x), "norm_weight": norm_weight, "eps": float(eps), "weight": weight,
            "weight_stride": weight.stride(0), "output": output, "normed": normed, "num_rows": rows,
        },
        {
            "N": output.size(-1), "K": inner, "GATED": gated, **config.constants(rows),
        },
        num_warps=config.slabs,
        num_stages=config.stages(rows, x.element_size(), 2 if gated else 1),
    )


@triton.jit(do_not_specialize=["x_size1", "x_size2", "num_rows"])
def norm_linear_kernel(
    x, x_size1, x_size2, x_stride0, x_stride1, x_stride2, norm_weight, eps, weight, weight_stride, output, normed,
    num_rows, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLABS: tl.constexpr, SLAB_K: tl.constexpr
):
    """Programs (BLOCK_M rows, BLOCK_N columns). The normed row is rounded once, as the tensor cores need it."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    x_rows = x + row_offset(rows, x_size1, x_size2, x_stride0, x_stride1, x_stride2)  # [BLOCK_M]
    weight_rows = weight + n.to(tl.int64) * weight_stride  # [BLOCK_N]
    up_rows = weight + (n.to(tl.int64) + N) * weight_stride  # only read where GATED
    EVEN_K: tl.constexpr = K % (SLABS * SLAB_K) == 0
    EVEN_N: tl.constexpr = N % BLOCK_N == 0

    ONE_BLOCK: tl.constexpr = K <= SLABS * SLAB_K
    if not ONE_BLOCK:
        scale = row_rms_scale(x_rows, row_mask, eps, K, BLOCK_M, SLABS, SLAB_K)
    sums = tl.zeros([SLABS, BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([SLABS, BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, SLABS * SLAB_K):
        k = start + block_columns(SLABS, SLAB_K)
        w = load_weight(weight_rows, n_mask, k, K, EVEN_N, EVEN_K)
        if GATED:
            up = load_weight(up_rows, n_mask, k, K, EVEN_N, EVEN_K)
        a = load_rows(x_rows, row_mask, k, K, EVEN_K).to(tl.float32)
        norm = load_vector(norm_weight, k, K, EVEN_K)
        if ONE_BLOCK:
            scale = rms_scale(tl.sum(tl.sum(a * a, 2), 0), eps, K)  # behind the loads of the weights
        a = a * scale[None, :, None] * norm
        sums = multiply(a, w, sums)
        if GATED:
            ups = multiply(a, up, ups)
        if normed is not None:
            mask = (row_mask & (tl.program_id(1) == 0))[None, :, None] & (k < K)[:, None, :]
            tl.store(normed + rows.to(tl.int64)[None, :, None] * K + k[:, None, :], a, mask=mask)

    y = tl.sum(sums, 0)  # [BLOCK_M, BLOCK_N]
    if GATED:
        y = gelu_tanh(y) * tl.sum(ups, 0)
    tl.store(output + rows.to(tl.int64)[:, None] * N + n[None, :], y, mask=row_mask[:, None] & n_mask[None, :])
