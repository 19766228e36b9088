"""Reference of centroid_logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ._math import linear, matmul, rank_descending
from ._rank import suppress


def centroid_logits(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and ids of the best centroids' tokens: best centroid first, its tokens as token_ordering lists them.

    Only the rows of these tokens are gathered from the head and converted.
    """
    _, chosen = rank_descending(linear(normed, centroid_weight), num_active)  # [..., num_active]
    size = token_ordering.size(0) // centroid_weight.size(0)
    place = torch.arange(size, device=normed.device)
    places = (chosen.unsqueeze(-1) * size + place).flatten(-2)  # [..., num_active * size]
    token_ids = token_ordering[places].long().clamp(0, lm_head_weight.size(0) - 1)
    rows = lm_head_weight[places if centroid_ordered else token_ids]  # [..., num_active * size, hidden]
    logits = matmul(rows, normed.unsqueeze(-1)).squeeze(-1)
    return suppress(logits, token_ids, suppress_ids), token_ids
