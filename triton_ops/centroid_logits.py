"""centroid_logits: three kernels, with the same arithmetic as centroid_topk."""

from __future__ import annotations

import torch
from torch import Tensor

from ._centroids import candidate_launch, selection_launches
from ._launch import Launch


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
    launches, results = plan(normed, centroid_weight, token_ordering, lm_head_weight, num_active,
                             centroid_ordered=centroid_ordered, suppress_ids=suppress_ids)
    for launch in launches:
        launch.run()
    return results


def plan(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """The launches and the results that they write."""
    num_centroids = centroid_weight.size(0)
    shape = (*normed.shape[:-1], num_active * (token_ordering.size(0) // num_centroids))
    logits = normed.new_empty(shape, dtype=torch.float32)
    token_ids = normed.new_empty(shape, dtype=torch.int64)
    launches, chosen = selection_launches(normed, centroid_weight, num_active)
    launches.append(candidate_launch(normed, chosen, token_ordering, lm_head_weight, num_centroids, centroid_ordered,
                                     outputs={"logits": logits, "token_ids": token_ids}, suppress_ids=suppress_ids))
    return launches, (logits, token_ids)
