"""Private kernels of a draft round: few launches a step, each finishing in its prologue what the one before left.

A projection leaves the partial sums of its splits; whoever reads it adds them, norms and adds the residual, once in
every program, which costs less than a launch. Weights are loaded before the kernel waits for those in front of it.
Small hidden sizes only: a program holds whole rows of [BLOCK_M, K].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._early import let_others_start, wait_for_others
from ._gemm import gelu_tanh
from ._round_math import rms_scale, take_in
from ._topk import NO_ORDER, exact_sum, finite_or_zero, no_nan, to_logprob


@triton.jit
def load_tile(weight, stride, n, k):
    """weight[n, k].T [k, n]; both in range."""
    return tl.load(weight + n.to(tl.int64)[None, :] * stride + k[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def norm_linear_round(
    partials, residual, post_norm, scale, x_out, norm, weight, weight_stride, output, normed, eps, num_rows,
    other_weight, other_stride, scores, group_max,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OTHERS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr
):
    """Grid (row blocks, (N + OTHERS) / BLOCK_N): x from its splits, left in `x_out`; then rmsnorm(x) * norm @ weight.T.

    With `normed` the normed rows go there too. With OTHERS further columns are scores of centroids, with the largest of
    each GROUP, NaN as -inf.
    """
    let_others_start(EARLY)
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    k = tl.arange(0, K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_score = tl.program_id(1) * BLOCK_N >= N
    if OTHERS == 0:
        w = load_tile(weight, weight_stride, n, k)  # [K, BLOCK_N]
    elif is_score:
        w = load_tile(other_weight, other_stride, n - N, k)
    else:
        w = load_tile(weight, weight_stride, n, k)
    own = None if post_norm is None else tl.load(post_norm + k).to(tl.float32)
    factor = None if scale is None else tl.load(scale).to(tl.float32)
    gain = tl.load(norm + k).to(tl.float32)
    wait_for_others(EARLY)
    x = take_in(partials, residual, own, factor, eps, rows, row_mask, k, SPLITS, K, dtype)
    place = rows.to(tl.int64)[:, None] * K + k[None, :]
    first = row_mask[:, None] & (tl.program_id(1) == 0)
    if x_out is not None:
        tl.store(x_out + place, x, mask=first)
    h = (x * rms_scale(x, eps, K)[:, None] * gain[None, :]).to(dtype)
    if normed is not None:
        tl.store(normed + place, h, mask=first)
    y = tl.dot(h, w, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    out = output + rows.to(tl.int64)[:, None] * N + n[None, :]
    if OTHERS == 0:
        tl.store(out, y, mask=row_mask[:, None])
    elif is_score:
        y = no_nan(y)
        tl.store(scores + rows.to(tl.int64)[:, None] * OTHERS + (n - N)[None, :], y, mask=row_mask[:, None])
        GROUPS: tl.constexpr = BLOCK_N // GROUP
        largest = tl.max(tl.reshape(y, (BLOCK_M, GROUPS, GROUP)), 2)
        group = (tl.program_id(1) * BLOCK_N - N) // GROUP + tl.arange(0, GROUPS)
        at = rows.to(tl.int64)[:, None] * (OTHERS // GROUP) + group[None, :]
        tl.store(group_max + at, largest, mask=row_mask[:, None])
    else:
        tl.store(out, y, mask=row_mask[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def geglu_round(
    partials, residual, post_norm, scale, x_out, norm, gate_up, gate_up_stride, output, eps, num_rows,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr
):
    """Grid (row blocks, N / BLOCK_N): x, left in `x_out`; then the gated activations of rmsnorm(x) * norm."""
    let_others_start(EARLY)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    k = tl.arange(0, K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = load_tile(gate_up, gate_up_stride, n, k)  # [K, BLOCK_N]
    up = load_tile(gate_up, gate_up_stride, n + N, k)
    own = None if post_norm is None else tl.load(post_norm + k).to(tl.float32)
    factor = None if scale is None else tl.load(scale).to(tl.float32)
    gain = tl.load(norm + k).to(tl.float32)
    wait_for_others(EARLY)
    x = take_in(partials, residual, own, factor, eps, rows, row_mask, k, SPLITS, K, dtype)
    if x_out is not None:
        first = row_mask[:, None] & (tl.program_id(1) == 0)
        tl.store(x_out + rows.to(tl.int64)[:, None] * K + k[None, :], x, mask=first)
    h = (x * rms_scale(x, eps, K)[:, None] * gain[None, :]).to(dtype)
    y = gelu_tanh(tl.dot(h, gate, input_precision="ieee")) * tl.dot(h, up, input_precision="ieee")
    tl.store(output + rows.to(tl.int64)[:, None] * N + n[None, :], y, mask=row_mask[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def settle_round(
    partials, residual, post_norm, scale, x_out, eps, num_rows,
    K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr
):
    """Grid (rows): x, for kernels that would each have to add many rows."""
    let_others_start(EARLY)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    k = tl.arange(0, K)
    own = None if post_norm is None else tl.load(post_norm + k).to(tl.float32)
    factor = None if scale is None else tl.load(scale).to(tl.float32)
    wait_for_others(EARLY)
    dtype: tl.constexpr = x_out.dtype.element_ty
    x = take_in(partials, residual, own, factor, eps, rows, row_mask, k, SPLITS, K, dtype)
    tl.store(x_out + rows.to(tl.int64)[:, None] * K + k[None, :], x, mask=row_mask[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def linear_round(
    x, weight, weight_stride, output, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr
):
    """Grid (row blocks, N / BLOCK_N, K / BLOCK_K): sums of x [rows, K] @ weight.T: output [rows, splits, N]."""
    let_others_start(EARLY)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = load_tile(weight, weight_stride, n, k)
    wait_for_others(EARLY)
    a = tl.load(x + rows.to(tl.int64)[:, None] * K + k[None, :], mask=row_mask[:, None], other=0.0)
    y = tl.dot(a, w, input_precision="ieee")
    at = (rows.to(tl.int64) * (K // BLOCK_K) + tl.program_id(2))[:, None] * N + n[None, :]
    tl.store(output + at, y, mask=row_mask[:, None])


@triton.jit
def best_part(values_ptr, orders_ptr, rows, row_mask, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """The best of a row's PARTS candidates: its value and its order [M]."""
    part = tl.arange(0, BLOCK_P)
    mask = row_mask[:, None] & (part < PARTS)[None, :]
    at = rows.to(tl.int64)[:, None] * PARTS + part[None, :]
    values = tl.load(values_ptr + at, mask=mask, other=float("-inf"))
    orders = tl.load(orders_ptr + at, mask=mask, other=NO_ORDER)
    best = tl.max(values, 1)
    return best, tl.min(tl.where(values == best[:, None], orders, NO_ORDER), 1)


@triton.jit
def total_of_parts(max_ptr, sum_ptr, rows, row_mask, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Log of the sum of a row's exponentials [M]."""
    part = tl.arange(0, BLOCK_P)
    mask = row_mask[:, None] & (part < PARTS)[None, :]
    at = rows.to(tl.int64)[:, None] * PARTS + part[None, :]
    largest = tl.load(max_ptr + at, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=mask, other=0.0)
    top = tl.max(largest, 1)
    total = top + tl.log(exact_sum(sums * tl.exp(largest - finite_or_zero(top)[:, None]), 1))
    return tl.where(tl.abs(top) == float("inf"), top, total)


@triton.jit
def state_rows(row_index, index_stride, state, state_stride, rows, row_mask, rows_each, prev_rows):
    """Pointers to the states that `rows` grow from."""
    source = rows.to(tl.int64)
    if row_index is not None:
        inside = tl.load(row_index + rows // rows_each * index_stride + rows % rows_each, mask=row_mask, other=0)
        inside = tl.minimum(tl.maximum(inside.to(tl.int64), 0), prev_rows.to(tl.int64) - 1)
        source = (rows // rows_each).to(tl.int64) * prev_rows + inside
    return state + source * state_stride


@triton.jit
def embed_rows(
    token_ids, ids_stride, part_values, part_orders, part_max, part_sum, ids_out, logprobs_out, out_stride, embed,
    embed_stride, rows, row_mask, rows_each, is_first, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Pointers to the embeddings of the tokens of `rows`, and which of them exist.

    The ids are those given, or with PARTS the best of the last head's candidates, which the program that `is_first`
    leaves in `ids_out` and `logprobs_out`.
    """
    if PARTS > 0:
        best, order = best_part(part_values, part_orders, rows, row_mask, PARTS, BLOCK_P)
        ids = order >> 32
        if is_first:
            total = total_of_parts(part_max, part_sum, rows, row_mask, PARTS, BLOCK_P)
            tl.store(ids_out + rows.to(tl.int64) * out_stride, ids, mask=row_mask)
            tl.store(logprobs_out + rows.to(tl.int64) * out_stride, to_logprob(best, total), mask=row_mask)
    else:
        place = token_ids + (rows // rows_each).to(tl.int64) * ids_stride + rows % rows_each
        ids = tl.load(place, mask=row_mask, other=0).to(tl.int64)
    exist = row_mask & (ids >= 0) & (ids < VOCAB)
    return embed + tl.where(exist, ids, 0) * embed_stride, exist


@triton.jit(do_not_specialize=["num_rows", "rows_each", "prev_rows", "ids_stride", "index_stride", "out_stride"])
def pre_round(
    token_ids, ids_stride, row_index, index_stride, part_values, part_orders, part_max, part_sum, ids_out,
    logprobs_out, out_stride, embed, embed_stride, embed_scale, state, state_stride, weight, weight_stride, output,
    num_rows, rows_each, prev_rows,
    VOCAB: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HALF_SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr
):
    """Grid (row blocks, N / BLOCK_N, 2 * HALF_SPLITS): partial sums of concat(embedding, state) @ weight.T.

    K is the backbone; the first half of the splits is of the embedding.
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    in_state = split >= HALF_SPLITS
    part = split % HALF_SPLITS
    k = part * (BLOCKS * BLOCK_K) + tl.arange(0, BLOCK_K)
    w_at = weight + n.to(tl.int64)[None, :] * weight_stride + tl.where(in_state, K, 0)
    ws = ()
    for block in tl.static_range(BLOCKS):
        ws += (tl.load(w_at + (k + block * BLOCK_K)[:, None], mask=(k + block * BLOCK_K < K)[:, None], other=0.0),)
    wait_for_others(EARLY)
    # Not before: the attention behind this would crowd onto the few SMs that the last kernel of the step before leaves
    # free, and the segment behind it wait for room.
    let_others_start(EARLY)
    if in_state:
        at = state_rows(row_index, index_stride, state, state_stride, rows, row_mask, rows_each, prev_rows)
        x_mask = row_mask
        factor = 1.0  # changes no bit
    else:
        at, x_mask = embed_rows(
            token_ids, ids_stride, part_values, part_orders, part_max, part_sum, ids_out, logprobs_out, out_stride,
            embed, embed_stride, rows, row_mask, rows_each, (split == 0) & (tl.program_id(1) == 0), VOCAB, PARTS,
            BLOCK_P
        )
        factor = embed_scale
    xs = ()
    for block in tl.static_range(BLOCKS):
        mask = x_mask[:, None] & (k + block * BLOCK_K < K)[None, :]
        xs += (tl.load(at[:, None] + (k + block * BLOCK_K)[None, :], mask=mask, other=0.0),)
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.static_range(BLOCKS):
        y = tl.dot((xs[block].to(tl.float32) * factor).to(dtype), ws[block], y, input_precision="ieee")
    to = (rows.to(tl.int64) * (2 * HALF_SPLITS) + split)[:, None] * N + n[None, :]
    tl.store(output + to, y, mask=row_mask[:, None])


@triton.jit(do_not_specialize=["seed_stride", "roots_stride"])
def finish_round(
    part_values, part_orders, part_max, part_sum, seed_ids, seed_stride, roots, roots_stride, cand_ids, logprobs,
    cand_scores, draft_ids, positions,
    STEPS: tl.constexpr, NODES: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr
):
    """Grid (rows): the last step's id and logprob, the chain's scores, and the draft that follows from them."""
    let_others_start(EARLY)
    row = tl.program_id(0)
    rows = row + tl.arange(0, 1)
    everywhere = rows >= 0
    seed = tl.load(seed_ids + row.to(tl.int64) * seed_stride).to(tl.int64)
    root = None if roots is None else tl.load(roots + row.to(tl.int64) * roots_stride).to(tl.int64)
    wait_for_others(EARLY)
    best, order = best_part(part_values, part_orders, rows, everywhere, PARTS, BLOCK_P)
    total = total_of_parts(part_max, part_sum, rows, everywhere, PARTS, BLOCK_P)
    last = tl.sum(to_logprob(best, total), 0)
    last_id = tl.sum(order >> 32, 0)
    nodes, steps = row.to(tl.int64) * NODES, row.to(tl.int64) * STEPS
    tl.store(draft_ids + nodes, seed)
    score = 0.0
    for step in tl.static_range(STEPS):
        token = last_id if step == STEPS - 1 else tl.load(cand_ids + steps + step)
        score += last if step == STEPS - 1 else tl.load(logprobs + steps + step)
        tl.store(cand_scores + steps + step, score)
        if step == STEPS - 1:
            tl.store(cand_ids + steps + step, token)
            tl.store(logprobs + steps + step, last)
        if step + 1 < NODES:
            tl.store(draft_ids + nodes + step + 1, token)
    if positions is not None:
        for node in tl.static_range(NODES):
            tl.store(positions + nodes + node, root + node)
