"""Device functions of the wide GEMMs: y^T = weight @ x^T, 64 or more rows of the weights by 16 to 64 rows of x.

The weights are the M operand of the tensor core and go there from shared memory, which asynchronous copies fill some
stages ahead; the few rows of x are the N operand. On Hopper that is a wgmma, on sm_100 a tcgen05.mma, elsewhere an mma:
one kind for any number of rows on a given GPU (the tests look at the PTX). Each adds 16 columns of K to its sum, in
order, so a row's sum over K does not depend on how many rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_pointers(weight, weight_stride, first, N: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Rows `first` to `first` + BLOCK_N - 1 of each of PARTS matrices of N rows, one below the other.

    Behind a matrix it is its last row again, whose sums are not stored.
    """
    i = tl.arange(0, PARTS * BLOCK_N)
    n = i // BLOCK_N * N + tl.minimum(first + i % BLOCK_N, N - 1)
    return weight + n.to(tl.int64) * weight_stride  # [PARTS * BLOCK_N]


@triton.jit
def load_weights(weight_rows, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """The weights at columns `k` [BLOCK_K] of the rows that `weight_rows` points to; 0 outside."""
    pointers = weight_rows[:, None] + k[None, :]
    return tl.load(pointers) if EVEN_K else tl.load(pointers, mask=(k < K)[None, :], other=0.0)


@triton.jit
def load_x(x_rows, row_mask, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """x at columns `k` [BLOCK_K] of the rows that `x_rows` [ROWS] points to; 0 outside."""
    mask = row_mask[:, None]
    if not EVEN_K:
        mask = mask & (k < K)[None, :]
    return tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0)  # [ROWS, BLOCK_K]


@triton.jit
def multiply(weight, x, sums):
    """sums + weight @ x^T, with x rounded to the weights' dtype."""
    return tl.dot(weight, tl.trans(x.to(weight.dtype)), sums)  # [rows of the weights, ROWS]


@triton.constexpr_function
def halvings(size):
    """How often a power of 2 can be halved."""
    return int(size).bit_length() - 1


@triton.jit
def row_sums(values):
    """The sum of each row of [ROWS, 2^i], of neighbours first: an order that no layout of the tile can change.

    tl.sum adds what a thread holds first, and how many columns that is may follow ROWS.
    """
    for _ in tl.static_range(halvings(values.shape[1])):
        values = tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // 2, 2]), 2)
    return tl.reshape(values, [values.shape[0]])  # [ROWS]


@triton.jit
def row_squares(x_rows, row_mask, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sum of x^2 of whole rows."""
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=256 // ROWS):  # so that loads are in flight together
        x = load_x(x_rows, row_mask, start + tl.arange(0, BLOCK_K), K, K % BLOCK_K == 0).to(tl.float32)
        squares += x * x
    return row_sums(squares)  # [ROWS]


@triton.jit
def store_columns(output, row_stride, sums, rows, row_mask, n, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """`sums` [BLOCK_N, ROWS] to columns `n` [BLOCK_N] of the rows `rows` of `output`."""
    pointers = output + rows.to(tl.int64)[None, :] * row_stride + n[:, None]
    mask = row_mask[None, :]
    if N % BLOCK_N != 0:
        mask = mask & (n < N)[:, None]
    tl.store(pointers, sums, mask=mask)
