"""Reference of tree_expand."""

from __future__ import annotations

import torch
from torch import Tensor

from ._math import accumulate, rank_descending


def tree_expand(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """cand_scores = scores + logprobs; the k best are the next frontier."""
    k = logprobs.size(2)
    if scores is None or frontier is None:  # the first step grows from the root
        scores = logprobs.new_zeros(logprobs.shape[:2])
        frontier = torch.full_like(scores, -1, dtype=torch.int64)
    sums = accumulate(scores).unsqueeze(-1) + accumulate(logprobs)  # [batch, rows, k]
    cand_scores = sums.masked_fill(sums.isnan(), -torch.inf).flatten(1)  # [batch, rows * k]
    cand_parent = frontier.long().repeat_interleave(k, dim=1)  # [batch, rows * k]

    _, best = rank_descending(cand_scores, k)  # [batch, k], places in this step's candidates
    next_ids = token_ids.flatten(1).gather(1, best).long()
    return next_ids, best // k, cand_scores.gather(1, best), best + cand_offset, cand_scores, cand_parent
