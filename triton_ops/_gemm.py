"""Device functions of the skinny GEMMs: y[m, n] = sum_k x[m, k] * weight[n, k], few rows m, each weight read once.

K is cut into blocks of SLABS slabs of SLAB_K columns: one slab a warp, one batch entry of a three-dimensional dot. So
every warp loads and multiplies its own part of the weights, no operand is held by two warps, and the chain of dependent
tensor-core instructions is SLABS times shorter than with a block's columns in a row; the slabs are added at the end.
A row's sum over k has the same order for any number of rows: BLOCK_M only says how many rows share a weight tile, and a
three-dimensional dot never becomes a Hopper wgmma, whatever its BLOCK_M.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_columns(SLABS: tl.constexpr, SLAB_K: tl.constexpr):
    """The columns of K's first block."""
    return tl.arange(0, SLABS)[:, None] * SLAB_K + tl.arange(0, SLAB_K)[None, :]  # [SLABS, SLAB_K]


@triton.jit
def load_rows(rows, row_mask, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """x at columns `k` [SLABS, SLAB_K] of the rows that `rows` [BLOCK_M] points to; 0 outside."""
    mask = row_mask[None, :, None]
    if not EVEN_K:
        mask = mask & (k < K)[:, None, :]
    return tl.load(rows[None, :, None] + k[:, None, :], mask=mask, other=0.0)  # [SLABS, BLOCK_M, SLAB_K]


@triton.jit
def load_vector(vector, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """vector[k] in fp32, shaped to be multiplied with rows; 0 outside."""
    values = tl.load(vector + k) if EVEN_K else tl.load(vector + k, mask=k < K, other=0.0)
    return values.to(tl.float32)[:, None, :]  # [SLABS, 1, SLAB_K]


@triton.jit
def load_weight(weight_rows, n_mask, k, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """The weights at columns `k` [SLABS, SLAB_K] of the rows that `weight_rows` [BLOCK_N] points to; 0 outside."""
    pointers = weight_rows[None, None, :] + k[:, :, None]
    if EVEN_N and EVEN_K:
        weight = tl.load(pointers)
    elif EVEN_N:
        weight = tl.load(pointers, mask=(k < K)[:, :, None], other=0.0)
    elif EVEN_K:
        weight = tl.load(pointers, mask=n_mask[None, None, :], other=0.0)
    else:
        weight = tl.load(pointers, mask=(k < K)[:, :, None] & n_mask[None, None, :], other=0.0)
    return weight  # [SLABS, SLAB_K, BLOCK_N]


@triton.jit
def multiply(x, weight, sums):
    """sums + x @ weight, slab by slab, with x rounded to the weights' dtype; fp32 in true fp32."""
    return tl.dot(x.to(weight.dtype), weight, sums, input_precision="ieee")  # [SLABS, BLOCK_M, BLOCK_N]


@triton.jit
def rms_scale(square_sum, eps, K: tl.constexpr):
    return tl.rsqrt(square_sum / K + eps)


@triton.jit
def row_rms_scale(rows, row_mask, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, SLABS: tl.constexpr,
                  SLAB_K: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of whole rows."""
    squares = tl.zeros([SLABS, BLOCK_M], tl.float32)
    for start in range(0, K, SLABS * SLAB_K):
        k = start + block_columns(SLABS, SLAB_K)
        x = load_rows(rows, row_mask, k, K, K % (SLABS * SLAB_K) == 0).to(tl.float32)
        squares += tl.sum(x * x, 2)
    return rms_scale(tl.sum(squares, 0), eps, K)  # [BLOCK_M]


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3): exact at both ends."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def store_partial(partials, sums, num_rows, split, SPLITS: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr):
    """The sums of programs (BLOCK_M rows, BLOCK_N columns) of one split into partials [num_rows, SPLITS, N], fp32."""
    first = tl.program_id(0) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pointers = partials + (first.to(tl.int64) * SPLITS + split) * N + row[:, None] * (SPLITS * N) + n[None, :]
    tl.store(pointers, tl.sum(sums, 0), mask=(row < num_rows - first)[:, None] & (n < N)[None, :])


@triton.jit
def add_splits(partials, row, n, mask, SPLITS: tl.constexpr, N: tl.constexpr):
    """The sum of a row's splits, in their order."""
    pointers = partials + row.to(tl.int64) * (SPLITS * N) + n
    total = tl.load(pointers, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * N, mask=mask, other=0.0)
    return total


@triton.jit
def norm_add(projected, n, mask, norm_weight, eps, residual, scale, N: tl.constexpr):
    """(residual + rmsnorm(projected) * norm_weight) * scale of one row in fp32; `residual` points to the row."""
    norm = tl.load(norm_weight + n, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    y = added + projected * rms_scale(tl.sum(projected * projected, 0), eps, N) * norm
    if scale is not None:
        y *= tl.load(scale).to(tl.float32)
    return y
