"""Drafts of a batch in which not everybody drafts: a request without one has its root alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..draft import DraftTree


def roots(seed_ids: Tensor, positions: Tensor, num_nodes: int = 1) -> DraftTree:
    """Trees of the root alone. Further nodes are padding: no link leads to them, and each sees only itself."""
    batch, device = seed_ids.size(0), seed_ids.device
    none = torch.full((batch, num_nodes), -1, device=device)
    ids = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)
    ids[:, 0] = seed_ids
    return DraftTree(
        draft_ids=ids,
        draft_positions=positions.unsqueeze(1).expand(-1, num_nodes).contiguous(),
        parents=none,
        selected=none[:, 1:],
        tree_mask=torch.eye(num_nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1),
        retrieve_index=torch.arange(batch * num_nodes, device=device).view(batch, num_nodes),
        retrieve_next_token=none,
        retrieve_next_sibling=none,
        cand_ids=ids[:, :0],
        cand_scores=torch.zeros(batch, 0, device=device),
    )


def spread(drafted: DraftTree, rows: Sequence[int], seed_ids: Tensor, positions: Tensor) -> DraftTree:
    """The trees of requests `rows` within the whole batch; the others have roots."""
    if len(rows) == seed_ids.size(0):
        return drafted
    whole = roots(seed_ids, positions, drafted.draft_ids.size(1))
    place = torch.tensor(rows, device=seed_ids.device)
    assert whole.draft_positions is not None and drafted.draft_positions is not None
    return whole._replace(
        draft_ids=whole.draft_ids.index_copy(0, place, drafted.draft_ids),
        draft_positions=whole.draft_positions.index_copy(0, place, drafted.draft_positions),
        parents=whole.parents.index_copy(0, place, drafted.parents),
        tree_mask=whole.tree_mask.index_copy(0, place, drafted.tree_mask),
        retrieve_next_token=whole.retrieve_next_token.index_copy(0, place, drafted.retrieve_next_token),
        retrieve_next_sibling=whole.retrieve_next_sibling.index_copy(0, place, drafted.retrieve_next_sibling),
    )
