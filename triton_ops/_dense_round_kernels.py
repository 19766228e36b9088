"""Private kernels of a draft round whose weights are large: hidden up to 1024, a dense head, few rows.

Memory is what such a step waits for. A program of a projection has one tile of the weights, 64 KB of it all on the way
before it waits for the kernels in front. Behind the wait are microseconds of arithmetic: the tile times 8 rows, one
matrix instruction's, of which the batch has some. What the splits of a projection leave, a small kernel adds, norms and
adds to the residual: in every program of the next one that took longer. Rows share nothing but the tile, and every sum
has the order of the weights' columns: a row's bits follow nothing but the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._early import let_others_start, wait_for_others
from ._gemm import block_columns, gelu_tanh
from ._prefetch import prefetch
from ._round_kernels import embed_rows, state_rows
from ._round_math import rms_scale_of_program, take_in
from ._wide_gemm import weight_pointers

ROWS = tl.constexpr(8)  # the fewest that a matrix instruction takes


@triton.jit
def seen_columns(column, first, K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Which of a tile's COLUMNS lie in its split of WIDTH and in K; None where all do."""
    seen = None
    if WIDTH != COLUMNS:
        seen = column < WIDTH
    if K % WIDTH != 0:
        seen = (first + column < K) & (column < WIDTH)
    return seen


@triton.jit
def load_tile(weight_rows, k, seen):
    """The weights at columns `k` of the rows that `weight_rows` points to, 0 where not seen.

    Rows come first: the compiler then puts those of a slab below each other in shared memory and spreads them over the
    banks. With slabs first, eight rows that a matrix instruction's load reads would all lie in the same banks.
    """
    at = weight_rows[:, None, None] + k[None, :, :]  # [BLOCK_N, SLABS, SLAB_K]
    mask = None if seen is None else seen[None, :, :]
    w = tl.load(at, mask=mask, other=None if seen is None else 0.0, eviction_policy="evict_first")
    return tl.permute(w, (1, 0, 2))  # [SLABS, BLOCK_N, SLAB_K]


@triton.jit
def ask_for_later(weight, weight_stride, N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
                  BLOCK_N: tl.constexpr, ROOM: tl.constexpr):
    """L2 for the tile of the program that is ROOM behind this one: the GPU has no room for it yet."""
    PIECES: tl.constexpr = 128 // (PARTS * BLOCK_N)  # of a row: a thread has one
    BYTES: tl.constexpr = WIDTH // PIECES * (weight.dtype.element_ty.primitive_bitwidth // 8)
    later = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) + ROOM
    first, split = later % tl.num_programs(0) * BLOCK_N, later // tl.num_programs(0)
    rows = weight_pointers(weight, weight_stride, first, N, BLOCK_N, PARTS) + split * WIDTH
    at = rows.to(tl.int64)[:, None] + tl.arange(0, PIECES)[None, :] * BYTES
    prefetch(at, split < tl.num_programs(1), BYTES)


@triton.jit
def load_x(x_rows, row_mask, k, seen):
    """x at columns `k` of the rows that `x_rows` points to, 0 where not seen: [SLABS, BLOCK_M, SLAB_K]."""
    mask = row_mask[None, :, None]
    if seen is not None:
        mask = mask & seen[:, None, :]
    return tl.load(x_rows[None, :, None] + k[:, None, :], mask=mask, other=0.0)


@triton.jit
def hold(w, HOLD: tl.constexpr):
    """w, in registers up to here: whoever put it into shared memory at once would stand still until it has come."""
    if HOLD:
        w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=2)
    return w


@triton.jit
def multiply(w, x):
    """w @ x^T [BLOCK_N, ROWS], a slab at a time, then their sum; x [SLABS, BLOCK_M, SLAB_K], over and over."""
    SLABS: tl.constexpr = x.shape[0]
    BLOCK_M: tl.constexpr = x.shape[1]
    SLAB_K: tl.constexpr = x.shape[2]
    x = tl.broadcast_to(x[:, None, :, :], (SLABS, ROWS // BLOCK_M, BLOCK_M, SLAB_K))
    x = tl.permute(tl.reshape(x, (SLABS, ROWS, SLAB_K)), (0, 2, 1))
    return tl.sum(tl.dot(w, x, input_precision="ieee"), 0)


@triton.jit
def store_rows(output, row_stride, sums, num_rows, n, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """`sums` [BLOCK_N, ROWS] to columns `n` of the rows of `output`."""
    rows = tl.arange(0, ROWS)
    mask = (rows < num_rows)[None, :]
    if N % BLOCK_N != 0:
        mask = mask & (n < N)[:, None]
    tl.store(output + rows.to(tl.int64)[None, :] * row_stride + n[:, None], sums, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def settle_dense(
    partials, residual, post_norm, scale, x_out, norm, normed, eps, num_rows,
    K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr
):
    """Grid (rows): x as take_in says, left in `x_out`, and rmsnorm(x) * norm in `normed`."""
    let_others_start(EARLY)
    dtype: tl.constexpr = normed.dtype.element_ty
    rows = tl.program_id(0) + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    k = tl.arange(0, K)
    own = None if post_norm is None else tl.load(post_norm + k).to(tl.float32)
    factor = None if scale is None else tl.load(scale).to(tl.float32)
    gain = tl.load(norm + k).to(tl.float32)
    wait_for_others(EARLY)
    x = take_in(partials, residual, own, factor, eps, rows, row_mask, k, SPLITS, K, dtype, SHORT=True)
    place = rows.to(tl.int64)[:, None] * K + k[None, :]
    if x_out is not None:
        tl.store(x_out + place, x, mask=row_mask[:, None])
    tl.store(normed + place, x * rms_scale_of_program(x, eps, K)[:, None] * gain[None, :], mask=row_mask[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def linear_dense(
    x, weight, weight_stride, output, num_rows,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLABS: tl.constexpr, SLAB_K: tl.constexpr, ROOM: tl.constexpr,
    HOLD: tl.constexpr, EARLY: tl.constexpr
):
    """Grid (N / BLOCK_N, SPLITS): sums of x [rows, K] @ weight.T over WIDTH columns: output [rows, SPLITS, N].

    GATED: gelu_tanh of the product with the first N rows of the weights, times that with the other N.
    ROOM: programs for which the GPU has room; 0 asks for no tile ahead.
    """
    let_others_start(EARLY)
    first, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    columns = block_columns(SLABS, SLAB_K)
    k = split * WIDTH + columns
    seen = seen_columns(columns, split * WIDTH, K, WIDTH, SLABS * SLAB_K)
    w = load_tile(weight_pointers(weight, weight_stride, first, N, BLOCK_N, 2 if GATED else 1), k, seen)
    if ROOM > 0:
        ask_for_later(weight, weight_stride, N, WIDTH, 2 if GATED else 1, BLOCK_N, ROOM)
    rows = tl.arange(0, BLOCK_M)
    wait_for_others(EARLY)
    a = load_x(x + rows.to(tl.int64) * K, rows < num_rows, k, seen)
    y = multiply(hold(w, HOLD), a)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, BLOCK_N, ROWS]), [1, 2, 0]))  # each [BLOCK_N, ROWS]
        y = gelu_tanh(gate) * up
    store_rows(output + split * N, SPLITS * N, y, num_rows, first + tl.arange(0, BLOCK_N), N, BLOCK_N)


@triton.jit(do_not_specialize=["num_rows", "rows_each", "prev_rows", "ids_stride", "index_stride", "out_stride"])
def pre_dense(
    token_ids, ids_stride, row_index, index_stride, part_values, part_orders, part_max, part_sum, ids_out,
    logprobs_out, out_stride, embed, embed_stride, embed_scale, state, state_stride, weight, weight_stride, output,
    num_rows, rows_each, prev_rows,
    VOCAB: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLABS: tl.constexpr,
    SLAB_K: tl.constexpr, HOLD: tl.constexpr, EARLY: tl.constexpr
):
    """Grid (N / BLOCK_N, 2 * SPLITS): sums of concat(embedding, state) @ weight.T over WIDTH columns, of the embedding
    in the first SPLITS, of the state in the others: output [rows, 2 * SPLITS, N]. K is the backbone."""
    let_others_start(EARLY)
    first, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    in_state = split >= SPLITS
    part = split % SPLITS
    columns = block_columns(SLABS, SLAB_K)
    k = part * WIDTH + columns
    seen = seen_columns(columns, part * WIDTH, K, WIDTH, SLABS * SLAB_K)
    w = load_tile(weight_pointers(weight, weight_stride, first, N, BLOCK_N, 1) + split // SPLITS * K, k, seen)
    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    wait_for_others(EARLY)
    if in_state:
        x_rows = state_rows(row_index, index_stride, state, state_stride, rows, row_mask, rows_each, prev_rows)
        x = load_x(x_rows, row_mask, k, seen)
    else:
        x_rows, x_mask = embed_rows(
            token_ids, ids_stride, part_values, part_orders, part_max, part_sum, ids_out, logprobs_out, out_stride,
            embed, embed_stride, rows, row_mask, rows_each, (split == 0) & (first == 0), VOCAB, PARTS, BLOCK_P
        )
        x = (load_x(x_rows, x_mask, k, seen).to(tl.float32) * embed_scale).to(w.dtype)
    y = multiply(hold(w, HOLD), x)
    store_rows(output + split * N, 2 * SPLITS * N, y, num_rows, first + tl.arange(0, BLOCK_N), N, BLOCK_N)
