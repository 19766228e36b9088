"""Triton kernel of tree_expand: one program ranks up to 64 candidates of a request against all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Launch
from ._tree import no_nan


@dataclass(frozen=True)
class Config:
    """`block` candidates a program, compared with as many at a time: 4096 comparisons are 32 a thread of 4 warps."""

    block: int
    num_warps: int


def config(num_candidates: int) -> Config:
    block = min(64, triton.next_power_of_2(num_candidates))
    return Config(block, num_warps=4 if block > 16 else 1)


def tree_expand(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`torch.ops.mtp.tree_expand` on a GPU."""
    launches, results = plan(logprobs, token_ids, cand_offset, scores=scores, frontier=frontier)
    for launch in launches:
        launch.run()
    return results


def plan(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    batch, rows, k = logprobs.shape
    chosen = config(rows * k)
    next_ids, row_index, next_frontier = (token_ids.new_empty((batch, k), dtype=torch.int64) for _ in range(3))
    next_scores = logprobs.new_empty((batch, k))
    cand_scores = logprobs.new_empty((batch, rows * k))
    cand_parent = token_ids.new_empty((batch, rows * k), dtype=torch.int64)
    args = {
        "logprobs": logprobs, "token_ids": token_ids, "scores": scores, "frontier": frontier,
        "next_ids": next_ids, "row_index": row_index, "next_scores": next_scores, "next_frontier": next_frontier,
        "cand_scores": cand_scores, "cand_parent": cand_parent, "cand_offset": cand_offset,
        "stride_logprobs_b": logprobs.stride(0), "stride_logprobs_r": logprobs.stride(1),
        "stride_ids_b": token_ids.stride(0), "stride_ids_r": token_ids.stride(1),
        "stride_scores_b": 0 if scores is None else scores.stride(0),
        "stride_frontier_b": 0 if frontier is None else frontier.stride(0),
    }
    constants = {"NUM_CANDIDATES": rows * k, "K": k, "BLOCK": chosen.block}
    grid = (batch, triton.cdiv(rows * k, chosen.block))
    launch = Launch(_tree_expand_kernel, grid, args, constants, num_warps=chosen.num_warps)
    return [launch], (next_ids, row_index, next_scores, next_frontier, cand_scores, cand_parent)


@triton.jit(do_not_specialize=["cand_offset"])
def _tree_expand_kernel(
    logprobs,  # [batch, rows, K] fp32
    token_ids,  # [batch, rows, K]
    scores,  # [batch, rows] fp32 or None
    frontier,  # [batch, rows] or None
    next_ids, row_index, next_scores, next_frontier,  # [batch, K]
    cand_scores, cand_parent,  # [batch, NUM_CANDIDATES]
    cand_offset,
    stride_logprobs_b, stride_logprobs_r, stride_ids_b, stride_ids_r, stride_scores_b, stride_frontier_b,
    NUM_CANDIDATES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    logprobs += request * stride_logprobs_b
    if scores is not None:
        scores += request * stride_scores_b
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < NUM_CANDIDATES
    own = _candidate_scores(logprobs, scores, place, stride_logprobs_r, NUM_CANDIDATES, K)
    row = place // K
    token = tl.load(token_ids + request * stride_ids_b + row.to(tl.int64) * stride_ids_r + place % K, mask=inside)

    beaten_by = tl.zeros([BLOCK, BLOCK], tl.int32)  # [other, place]
    for start in range(0, NUM_CANDIDATES, BLOCK):
        other = start + tl.arange(0, BLOCK)  # those past the end have -inf and the highest indices: they beat nobody
        score = _candidate_scores(logprobs, scores, other, stride_logprobs_r, NUM_CANDIDATES, K)[:, None]
        before = (score > own[None, :]) | ((score == own[None, :]) & (other[:, None] < place[None, :]))
        beaten_by += before.to(tl.int32)
    rank = tl.sum(beaten_by, axis=0)

    best = inside & (rank < K)
    out = request * K + rank
    tl.store(next_ids + out, token.to(tl.int64), mask=best)
    tl.store(row_index + out, row.to(tl.int64), mask=best)
    tl.store(next_scores + out, own, mask=best)
    tl.store(next_frontier + out, place + cand_offset.to(tl.int64), mask=best)
    parent = tl.full([BLOCK], -1, tl.int64)
    if frontier is not None:
        parent = tl.load(frontier + request * stride_frontier_b + row, mask=inside).to(tl.int64)
    tl.store(cand_scores + request * NUM_CANDIDATES + place, own, mask=inside)
    tl.store(cand_parent + request * NUM_CANDIDATES + place, parent, mask=inside)


@triton.jit
def _candidate_scores(logprobs, scores, place, stride_logprobs_r, NUM_CANDIDATES: tl.constexpr, K: tl.constexpr):
    """scores + logprobs of the candidates at `place`, -inf behind the last one; no NaN."""
    inside = place < NUM_CANDIDATES
    row = place // K
    logprob = tl.load(logprobs + row.to(tl.int64) * stride_logprobs_r + place % K, mask=inside, other=float("-inf"))
    if scores is None:
        return no_nan(logprob + 0.0)  # as the reference: -0.0 becomes 0.0
    else:
        return no_nan(tl.load(scores + row, mask=inside, other=0.0) + logprob)
