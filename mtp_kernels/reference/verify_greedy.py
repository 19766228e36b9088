"""Reference of verify_greedy."""

from __future__ import annotations

import torch
from torch import Tensor

from ._tree import accepted_path, at, in_range, list_children, take_rows


def verify_greedy(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_ids: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root, on to the first child whose token is the target's, as long as there is one."""
    ids, rows = draft_ids.long(), retrieve_index.long()  # [batch, N]
    batch, num_nodes = ids.shape
    has_row = in_range(rows, target_ids.numel())
    target = torch.where(has_row, take_rows(target_ids, rows, 0).long(), -1)  # [batch, N]

    children = list_children(retrieve_next_token, retrieve_next_sibling)  # [batch, N, N]
    flat = children.clamp(min=0).flatten(1)
    fits = (children >= 0) & has_row.gather(1, flat).view_as(children) & has_row.unsqueeze(-1)
    fits = fits & (ids.gather(1, flat).view_as(children) == target.unsqueeze(-1))
    found = fits.any(-1)  # [batch, N]: whether the walk goes on from this node, and where to
    child = children.gather(2, fits.byte().argmax(-1, keepdim=True)).squeeze(-1).clamp(min=0)

    node = torch.zeros(batch, dtype=torch.int64, device=ids.device)
    nodes, taken = [], []
    for _ in range(min(max_depth, num_nodes - 1)):
        walking = at(found, node)
        node = torch.where(walking, at(child, node), node)
        nodes.append(node)
        taken.append(walking)
    return accepted_path(nodes, taken, at(target, node), ids, rows, max_depth)
