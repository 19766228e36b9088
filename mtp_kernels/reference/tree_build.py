"""Reference of tree_build."""

from __future__ import annotations

import torch
from torch import Tensor

from ._math import rank_descending
from ._tree import in_range


def tree_build(
    root_ids: Tensor, cand_scores: Tensor, cand_ids: Tensor, cand_parent: Tensor, root_positions: Tensor,
    num_draft_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The num_draft_tokens - 1 best candidates behind the root, as a tree with mask and links."""
    batch, num_nodes, device = root_ids.size(0), num_draft_tokens, root_ids.device
    selected = rank_descending(cand_scores, num_nodes - 1)[1].sort(dim=1).values  # [batch, N - 1]
    parents = _parents(cand_parent.long(), selected)  # [batch, N]
    tree_mask = _ancestors(parents)  # [batch, N, N]
    depth = tree_mask.sum(-1) - 1  # [batch, N]
    draft_ids = torch.cat([root_ids.long().unsqueeze(1), cand_ids.long().gather(1, selected)], dim=1)
    draft_positions = root_positions.long().unsqueeze(1) + depth

    node = torch.arange(num_nodes, device=device)
    is_child = parents.unsqueeze(1) == node.unsqueeze(1)  # [batch, N, N]: [b, i, j] is "j is a child of i"
    siblings = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (parents >= 0).unsqueeze(2)
    retrieve_index = torch.arange(batch * num_nodes, device=device).view(batch, num_nodes)
    next_sibling = _first(siblings & (node > node.unsqueeze(1)))
    return draft_ids, draft_positions, parents, selected, tree_mask, retrieve_index, _first(is_child), next_sibling


def _parents(cand_parent: Tensor, selected: Tensor) -> Tensor:
    """The node that each node hangs under; -1 for the root, and for a parent that is out of range, late or not kept."""
    batch, num_candidates = cand_parent.shape
    node = torch.arange(1, selected.size(1) + 1, device=selected.device).expand(batch, -1)
    node_of = torch.full_like(cand_parent, -1).scatter(1, selected, node)  # [batch, num_candidates], -1: not kept
    wanted = cand_parent.gather(1, selected)  # [batch, N - 1]
    found = node_of.gather(1, wanted.clamp(0, max(num_candidates - 1, 0)))
    kept = torch.where(in_range(wanted, num_candidates) & (wanted < selected), found, -1)
    return torch.cat([cand_parent.new_full((batch, 1), -1), torch.where(wanted == -1, 0, kept)], dim=1)


def _ancestors(parents: Tensor) -> Tensor:
    """mask[b, i, j]: j is i or an ancestor of i. Each pass doubles how far up a node has looked."""
    num_nodes = parents.size(1)
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(parents.size(0), 1, 1)
    up, looked = parents, 1  # `up` is the node `looked` levels above, mask has what lies below that
    while looked < num_nodes:
        there = up >= 0
        index = up.clamp(min=0)
        mask = mask | (mask.gather(1, index.unsqueeze(-1).expand_as(mask)) & there.unsqueeze(-1))
        up = torch.where(there, up.gather(1, index), -1)
        looked *= 2
    return mask


def _first(choices: Tensor) -> Tensor:
    """The first true column of each row [..., N], -1 where there is none."""
    return torch.where(choices.any(-1), choices.byte().argmax(-1), -1)
