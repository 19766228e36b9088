"""Triton kernel of tree_build: one program a request ranks, numbers and links the candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Launch
from ._tree import ordered

TILE = 4096  # elements of a two-dimensional tile: 32 a thread of 4 warps, 16 of 8


@dataclass(frozen=True)
class Config:
    block_candidates: int
    block_nodes: int
    block_others: int  # candidates that all are compared with at a time; 0: the last one kept is searched for instead
    block_rows: int  # of the mask, at a time
    num_warps: int  # 8 for large trees: 4 would need every register there is (255 a thread on sm_90)


def config(num_candidates: int, num_nodes: int) -> Config:
    """Up to 256 candidates are compared in pairs (256 comparisons a thread); of more, 32 passes find the last kept."""
    candidates = max(16, triton.next_power_of_2(num_candidates))
    nodes = max(16, triton.next_power_of_2(num_nodes))
    others = min(candidates, TILE // candidates) if candidates <= 256 else 0
    rows = TILE // nodes if nodes <= 64 else TILE // 2 // nodes  # the larger tile spills registers
    return Config(candidates, nodes, others, min(nodes, rows), 8 if candidates > 128 or nodes > 32 else 4)


def tree_build(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`torch.ops.mtp.tree_build` on a GPU."""
    launches, results = plan(root_ids, cand_scores, cand_ids, cand_parent, root_positions, num_draft_tokens)
    for launch in launches:
        launch.run()
    return results


def plan(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    batch, num_candidates = cand_scores.shape
    num_nodes = num_draft_tokens
    chosen = config(num_candidates, num_nodes)
    draft_ids, draft_positions, parents, retrieve_index, next_token, next_sibling = (
        root_ids.new_empty((batch, num_nodes), dtype=torch.int64) for _ in range(6)
    )
    selected = root_ids.new_empty((batch, num_nodes - 1), dtype=torch.int64)
    tree_mask = root_ids.new_empty((batch, num_nodes, num_nodes), dtype=torch.bool)
    args = {
        "root_ids": root_ids, "cand_scores": cand_scores, "cand_ids": cand_ids, "cand_parent": cand_parent,
        "root_positions": root_positions, "draft_ids": draft_ids, "draft_positions": draft_positions,
        "parents": parents, "selected": selected, "tree_mask": tree_mask, "retrieve_index": retrieve_index,
        "retrieve_next_token": next_token, "retrieve_next_sibling": next_sibling, "num_candidates": num_candidates,
        "num_nodes": num_nodes, "stride_scores_b": cand_scores.stride(0), "stride_ids_b": cand_ids.stride(0),
        "stride_parent_b": cand_parent.stride(0),
    }
    constants = {
        "BLOCK_CANDIDATES": chosen.block_candidates, "BLOCK_NODES": chosen.block_nodes,
        "BLOCK_OTHERS": chosen.block_others, "BLOCK_ROWS": chosen.block_rows,
    }
    launch = Launch(_tree_build_kernel, (batch,), args, constants, num_warps=chosen.num_warps)
    results = (draft_ids, draft_positions, parents, selected, tree_mask, retrieve_index, next_token, next_sibling)
    return [launch], results


@triton.jit
def _tree_build_kernel(
    root_ids,  # [batch]
    cand_scores,  # [batch, num_candidates] fp32
    cand_ids, cand_parent,  # [batch, num_candidates]
    root_positions,  # [batch]
    draft_ids, draft_positions, parents,  # [batch, num_nodes]
    selected,  # [batch, num_nodes - 1]
    tree_mask,  # [batch, num_nodes, num_nodes]
    retrieve_index, retrieve_next_token, retrieve_next_sibling,  # [batch, num_nodes]
    num_candidates, num_nodes, stride_scores_b, stride_ids_b, stride_parent_b,
    BLOCK_CANDIDATES: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_OTHERS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = request * num_nodes  # of this request, in the results
    place = tl.arange(0, BLOCK_CANDIDATES)
    inside = place < num_candidates
    token = tl.load(cand_ids + request * stride_ids_b + place, mask=inside, other=-1).to(tl.int64)
    parent = tl.load(cand_parent + request * stride_parent_b + place, mask=inside, other=-2).to(tl.int64)
    position = tl.load(root_positions + request).to(tl.int64)
    root = tl.load(root_ids + request).to(tl.int64)

    scores = cand_scores + request * stride_scores_b
    if BLOCK_OTHERS > 0:
        kept = _keep_by_rank(scores, num_candidates, num_nodes - 1, BLOCK_CANDIDATES, BLOCK_OTHERS)
    else:
        kept = _keep_by_search(scores, num_candidates, num_nodes - 1, BLOCK_CANDIDATES)
    node = tl.cumsum(kept.to(tl.int32), axis=0)  # of a kept candidate: 1 to num_nodes - 1
    earlier = (parent >= 0) & (parent < place)
    parent_node = tl.gather(tl.where(kept, node, -1), tl.where(earlier, parent, 0).to(tl.int32), axis=0)
    parent_node = tl.where(parent == -1, 0, tl.where(earlier, parent_node, -1))

    tl.store(selected + first - request + node - 1, place.to(tl.int64), mask=kept)
    tl.store(draft_ids + first + node, token, mask=kept)
    tl.store(draft_ids + first, root)
    parents += first
    tl.store(parents + node, parent_node.to(tl.int64), mask=kept)
    tl.store(parents, tl.full([], -1, tl.int64))
    tl.debug_barrier()  # from here on, parents are read in the order of the nodes

    column = tl.arange(0, BLOCK_NODES)
    column_parent = tl.load(parents + column, mask=column < num_nodes, other=-2).to(tl.int32)
    for start in range(0, num_nodes, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        exists = row < num_nodes
        row_parent = tl.load(parents + row, mask=exists, other=-1).to(tl.int32)
        mask = row[:, None] == column[None, :]
        depth = tl.zeros([BLOCK_ROWS], tl.int32)
        up = row_parent
        while tl.max(up, axis=0) >= 0:  # a parent is a lower node, so this ends
            mask |= up[:, None] == column[None, :]
            depth += (up >= 0).to(tl.int32)
            up = tl.load(parents + up, mask=up >= 0, other=-1).to(tl.int32)
        cells = row[:, None] * num_nodes + column[None, :]
        tl.store(tree_mask + first * num_nodes + cells, mask, mask=exists[:, None] & (column < num_nodes)[None, :])

        none = BLOCK_NODES
        is_child = column_parent[None, :] == row[:, None]
        child = tl.min(tl.where(is_child, column[None, :], none), axis=1)
        is_sibling = (column_parent[None, :] == row_parent[:, None]) & (row_parent >= 0)[:, None]
        is_sibling &= column[None, :] > row[:, None]
        sibling = tl.min(tl.where(is_sibling, column[None, :], none), axis=1)
        tl.store(retrieve_next_token + first + row, tl.where(child < none, child, -1).to(tl.int64), mask=exists)
        tl.store(retrieve_next_sibling + first + row, tl.where(sibling < none, sibling, -1).to(tl.int64), mask=exists)
        tl.store(retrieve_index + first + row, first + row, mask=exists)
        tl.store(draft_positions + first + row, position + depth, mask=exists)


@triton.jit
def _load_keys(scores, place, num_candidates):
    """Scores as integers in their order (`ordered`); 0, the lowest, behind the last candidate."""
    inside = place < num_candidates
    return tl.where(inside, ordered(tl.load(scores + place, mask=inside, other=0.0)), 0)


@triton.jit
def _keep_by_rank(
    scores, num_candidates, num_kept, BLOCK_CANDIDATES: tl.constexpr, BLOCK_OTHERS: tl.constexpr
):
    """Whether fewer than num_kept others come before a candidate."""
    place = tl.arange(0, BLOCK_CANDIDATES)
    key = _load_keys(scores, place, num_candidates)
    beaten_by = tl.zeros([BLOCK_OTHERS, BLOCK_CANDIDATES], tl.int32)
    for start in range(0, num_candidates, BLOCK_OTHERS):
        other = start + tl.arange(0, BLOCK_OTHERS)
        other_key = _load_keys(scores, other, num_candidates)[:, None]
        before = (other_key > key[None, :]) | ((other_key == key[None, :]) & (other[:, None] < place[None, :]))
        beaten_by += before.to(tl.int32)
    return (tl.sum(beaten_by, axis=0) < num_kept) & (place < num_candidates)


@triton.jit
def _keep_by_search(scores, num_candidates, num_kept, BLOCK_CANDIDATES: tl.constexpr):
    """The key of the last one kept is the highest that num_kept candidates reach; it is found bit by bit."""
    place = tl.arange(0, BLOCK_CANDIDATES)
    key = _load_keys(scores, place, num_candidates)
    last = tl.zeros([], tl.uint32)
    for i in range(32):
        tried = last | (tl.full([], 1 << 31, tl.uint32) >> i)
        last = tl.where(tl.sum((key >= tried).to(tl.int32), axis=0) >= num_kept, tried, last)
    above = key > last
    level = (key == last) & (place < num_candidates)
    left = num_kept - tl.sum(above.to(tl.int32), axis=0)
    return above | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= left))
