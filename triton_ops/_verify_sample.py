"""Triton kernels of verify_sample. All masses are fp64, as the op's definition says."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tree import fill_behind, has_row, load_link, row_offset

BLOCK_PATH = tl.constexpr(128)  # places of a path that are filled at a time: one a thread


@triton.jit(do_not_specialize=["num_rows"])
def row_sums_kernel(
    retrieve_index, retrieve_next_token,  # [batch, num_nodes]
    target_probs,  # [num_rows, vocab] or [batch, num_nodes, vocab]
    draft_probs,  # [batch, num_nodes, vocab] or None
    totals,  # [batch, num_nodes, 1 or 2: target and draft, NUM_CHUNKS] fp64
    stride_index_b, stride_token_b, stride_target_b, stride_target_n, rows_per_request, stride_draft_b, stride_draft_n,
    num_nodes, num_rows, vocab,
    CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
):
    """One chunk of one row; the rows of leaves, and of nodes without a row, are never asked for."""
    request = (tl.program_id(0) // num_nodes).to(tl.int64)
    node = tl.program_id(0) % num_nodes
    chunk, source = tl.program_id(1), tl.program_id(2)
    row = tl.load(retrieve_index + request * stride_index_b + node).to(tl.int64)
    child = load_link(retrieve_next_token + request * stride_token_b, node, num_nodes)
    if has_row(row, num_rows) & (child >= 0):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        totals += (tl.program_id(0).to(tl.int64) * tl.num_programs(2) + source) * NUM_CHUNKS + chunk
        if source == 0:
            probs = target_probs + row_offset(row, rows_per_request, stride_target_b, stride_target_n)
            tl.store(totals, tl.sum(_load_masses(probs, column, column < vocab), axis=0))
        elif draft_probs is not None:
            draft = draft_probs + request * stride_draft_b + node.to(tl.int64) * stride_draft_n
            tl.store(totals, tl.sum(_load_masses(draft, column, column < vocab), axis=0))


@triton.jit(do_not_specialize=["num_rows", "width"])
def walk_kernel(
    draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling,  # [batch, num_nodes]
    target_probs,  # [num_rows, vocab] or [batch, num_nodes, vocab]
    draft_probs,  # [batch, num_nodes, vocab] or None
    uniform,  # [batch, num_nodes]
    totals,  # [batch, num_nodes, 1 or 2, NUM_CHUNKS] fp64
    accept_index, num_accepted, accept_ids,  # [batch, width], [batch], [batch, width]
    left,  # [batch, 2: what the tries have left, the target, NUM_CHUNKS] fp64
    scales,  # [batch, 2: of the target, of the draft] fp64
    ends,  # [batch, 4: node (-1 for a root without a row), its row, nodes of the path, children rejected there]
    stride_ids_b, stride_index_b, stride_token_b, stride_sibling_b, stride_uniform_b,
    stride_target_b, stride_target_n, rows_per_request, stride_draft_b, stride_draft_n,
    num_nodes, num_rows, width, vocab,
    CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_NODES: tl.constexpr,
):
    """Every program walks, for itself, to the last node, and sums its chunk there; the first also writes the path."""
    SOURCES: tl.constexpr = 1 if draft_probs is None else 2
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draft_ids += request * stride_ids_b
    retrieve_index += request * stride_index_b
    retrieve_next_token += request * stride_token_b
    retrieve_next_sibling += request * stride_sibling_b
    uniform += request * stride_uniform_b
    totals += request * num_nodes * (SOURCES * NUM_CHUNKS)
    accept_index += request * width
    accept_ids += request * width
    most = tl.minimum(width, num_nodes) - 1
    tries_allowed = num_nodes if draft_probs is None else 1
    writes = chunk == 0

    row = tl.load(retrieve_index).to(tl.int64)  # of `node`
    tl.store(accept_index, row, mask=writes)
    node = tl.where(has_row(row, num_rows), 0, -1)
    end = node  # where the walk stands
    reached = 0  # nodes of the path
    tries = 0  # children rejected at `end`
    scale = tl.full([], 1.0, tl.float64)
    draft_scale = tl.full([], 0.0, tl.float64)
    lane = tl.arange(0, BLOCK_NODES)
    while node >= 0:
        child = load_link(retrieve_next_token, tl.where(reached < most, node, -1), num_nodes)
        probs = target_probs + row_offset(row, rows_per_request, stride_target_b, stride_target_n)
        remaining = _total(totals + node * (SOURCES * NUM_CHUNKS), child >= 0, NUM_CHUNKS, BLOCK_CHUNKS)
        if draft_probs is not None:
            draft = draft_probs + request * stride_draft_b + node.to(tl.int64) * stride_draft_n
            scale = tl.where(child >= 0, _inverse(remaining), 1.0)  # where nothing is tried, any scale will do
            total = _total(totals + (node * SOURCES + 1) * NUM_CHUNKS, child >= 0, NUM_CHUNKS, BLOCK_CHUNKS)
            draft_scale = _inverse(total)
        node = tl.full([], -1, tl.int32)
        tries = 0
        seen = tl.full([BLOCK_NODES], -1, tl.int64)  # tokens rejected here
        while (child >= 0) & (tries < tries_allowed):
            child_row = tl.load(retrieve_index + child).to(tl.int64)
            token = tl.load(draft_ids + child).to(tl.int64)
            number = tl.load(uniform + child).to(tl.float64)
            sibling = load_link(retrieve_next_sibling, child, num_nodes)
            can_try = has_row(child_row, num_rows)
            known = (token >= 0) & (token < vocab)
            mass = _load_masses(probs, token, known & can_try)
            if draft_probs is None:
                if tries > 0:  # a token that was rejected has no mass left
                    mass = tl.where(tl.max((seen == token).to(tl.int32), axis=0) > 0, 0.0, mass)
                taken = (mass > 0) & (number * tl.maximum(remaining, 0.0) < mass)
                seen = tl.where((lane == tries) & can_try, token, seen)
                remaining -= mass
            else:
                draft_mass = _load_masses(draft, token, known & can_try)
                taken = (mass > 0) & (number * (draft_mass * draft_scale) < mass * scale)
            if taken:
                tl.store(accept_ids + reached, token, mask=writes)
                tl.store(accept_index + reached + 1, child_row, mask=writes)
                node = child
                end = child
                row = child_row
                child = tl.full([], -1, tl.int32)
            else:
                child = sibling
                tries += 1
        reached += 1

    column = chunk * CHUNK + tl.arange(0, CHUNK)
    target, rest = _weights(
        draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs, draft_probs, request, end,
        row, tries, scale, draft_scale, column, num_nodes, num_rows, vocab, stride_target_b, stride_target_n,
        rows_per_request, stride_draft_b, stride_draft_n,
    )
    tl.store(left + (request * 2) * NUM_CHUNKS + chunk, tl.sum(rest, axis=0))
    tl.store(left + (request * 2 + 1) * NUM_CHUNKS + chunk, tl.sum(target, axis=0))
    if writes:
        tl.store(num_accepted + request, tl.maximum(reached - 1, 0).to(tl.int64))
        fill_behind(accept_index, tl.maximum(reached, 1), width, BLOCK_PATH)
        fill_behind(accept_ids, reached, width, BLOCK_PATH)
        tl.store(ends + request * 4, end.to(tl.int64))
        tl.store(ends + request * 4 + 1, row)
        tl.store(ends + request * 4 + 2, reached.to(tl.int64))
        tl.store(ends + request * 4 + 3, tries.to(tl.int64))
        tl.store(scales + request * 2, scale)
        tl.store(scales + request * 2 + 1, draft_scale)


@triton.jit(do_not_specialize=["num_rows", "width"])
def draw_kernel(
    draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling,  # [batch, num_nodes]
    target_probs,  # [num_rows, vocab] or [batch, num_nodes, vocab]
    draft_probs,  # [batch, num_nodes, vocab] or None
    uniform_final,  # [batch]
    accept_ids,  # [batch, width]
    left, scales, ends,  # of walk_kernel
    stride_ids_b, stride_index_b, stride_token_b, stride_sibling_b,
    stride_target_b, stride_target_n, rows_per_request, stride_draft_b, stride_draft_n,
    num_nodes, num_rows, width, vocab,
    CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):
    """The first token whose cumulative weight exceeds uniform_final * total: its chunk first, then its place there."""
    request = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + request * 4).to(tl.int32)
    row = tl.load(ends + request * 4 + 1)
    reached = tl.load(ends + request * 4 + 2)
    tries = tl.load(ends + request * 4 + 3).to(tl.int32)
    scale, draft_scale = tl.load(scales + request * 2), tl.load(scales + request * 2 + 1)
    number = tl.load(uniform_final + request).to(tl.float64)

    chunk = tl.arange(0, BLOCK_CHUNKS)
    inside = chunk < NUM_CHUNKS
    sums = tl.load(left + (request * 2) * NUM_CHUNKS + chunk, mask=inside, other=0.0)
    target_sums = tl.load(left + (request * 2 + 1) * NUM_CHUNKS + chunk, mask=inside, other=0.0)
    any_left = tl.max(sums, axis=0) > 0
    sums = tl.where(any_left, sums, target_sums)  # where rounding has left nothing
    cumulative = tl.cumsum(sums, axis=0)
    threshold = number * tl.sum(tl.where(chunk == NUM_CHUNKS - 1, cumulative, 0.0), axis=0)
    where = _first_above(cumulative, sums, threshold, chunk, BLOCK_CHUNKS)
    before = tl.sum(tl.where(chunk == where - 1, cumulative, 0.0), axis=0)

    column = where * CHUNK + tl.arange(0, CHUNK)
    target, rest = _weights(
        draft_ids + request * stride_ids_b, retrieve_index + request * stride_index_b,
        retrieve_next_token + request * stride_token_b, retrieve_next_sibling + request * stride_sibling_b,
        target_probs, draft_probs, request, end, row, tries, scale, draft_scale, column, num_nodes, num_rows, vocab,
        stride_target_b, stride_target_n, rows_per_request, stride_draft_b, stride_draft_n,
    )
    weights = tl.where(any_left, rest, target)
    place = _first_above(before + tl.cumsum(weights, axis=0), weights, threshold, tl.arange(0, CHUNK), CHUNK)
    token = tl.where(end >= 0, where * CHUNK + place, -1).to(tl.int64)
    tl.store(accept_ids + request * width + tl.maximum(reached - 1, 0), token)


@triton.jit
def _load_masses(probs, column, mask):
    """Probabilities in fp64; what is none counts as 0."""
    loaded = tl.load(probs + column, mask=mask, other=0.0).to(tl.float32)
    return tl.where((loaded > 0) & (loaded < float("inf")), loaded, 0.0).to(tl.float64)


@triton.jit
def _total(totals, wanted, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    chunk = tl.arange(0, BLOCK_CHUNKS)
    return tl.sum(tl.load(totals + chunk, mask=wanted & (chunk < NUM_CHUNKS), other=0.0), axis=0)


@triton.jit
def _inverse(total):
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _weights(
    draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs, draft_probs, request, end,
    row, tries, scale, draft_scale, column, num_nodes, num_rows, vocab, stride_target_b, stride_target_n,
    rows_per_request, stride_draft_b, stride_draft_n,
):
    """The target's weights in some columns of the last node's row, and what its `tries` rejected children leave.

    Both have the same scale, which is that of p where there is a draft distribution q to subtract.
    """
    inside = (column < vocab) & (end >= 0)
    probs = target_probs + row_offset(row, rows_per_request, stride_target_b, stride_target_n)
    target = _load_masses(probs, column, inside)
    rest = target
    child = load_link(retrieve_next_token, tl.where(tries > 0, end, -1), num_nodes)
    if draft_probs is None:
        for _ in range(tries):
            can_try = has_row(tl.load(retrieve_index + child).to(tl.int64), num_rows)
            token = tl.load(draft_ids + child).to(tl.int64)
            rest = tl.where((column == token) & can_try, 0.0, rest)
            child = load_link(retrieve_next_sibling, child, num_nodes)
    else:
        there = child >= 0
        child_row = tl.load(retrieve_index + child, mask=there, other=-1).to(tl.int64)
        target *= scale
        rest = target
        if has_row(child_row, num_rows):
            draft = draft_probs + request * stride_draft_b + end.to(tl.int64) * stride_draft_n
            rest = tl.maximum(target - _load_masses(draft, column, inside) * draft_scale, 0.0)
    return target, rest


@triton.jit
def _first_above(cumulative, weights, threshold, place, BLOCK: tl.constexpr):
    """The first place with a weight whose cumulative one exceeds the threshold; else the last with a weight, or 0."""
    weighty = weights > 0
    first = tl.min(tl.where(weighty & (cumulative > threshold), place, BLOCK), axis=0)
    last = tl.max(tl.where(weighty, place, 0), axis=0)
    return tl.where(first < BLOCK, first, last)
