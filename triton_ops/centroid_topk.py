"""centroid_topk: the kernels of centroid_logits, which keep only the best of each piece, and a merge."""

from __future__ import annotations

from torch import Tensor

from ._centroids import BLOCK_T, candidate_launch, pieces, selection_launches
from ._launch import Launch
from ._topk import merge_launch, new_parts, new_results


def centroid_topk(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    k: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    launches, results = plan(normed, centroid_weight, token_ordering, lm_head_weight, num_active, k,
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
    k: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    """The launches and the results that they write."""
    num_centroids = centroid_weight.size(0)
    depth = min(k, BLOCK_T)
    num_parts = num_active * pieces(token_ordering.size(0) // num_centroids)
    launches, chosen = selection_launches(normed, centroid_weight, num_active)
    parts = new_parts(normed, chosen.size(0), num_parts, depth)
    results = new_results(normed, k)
    launches.append(candidate_launch(normed, chosen, token_ordering, lm_head_weight, num_centroids, centroid_ordered,
                                     outputs=parts, depth=depth, suppress_ids=suppress_ids))
    unranked: dict[str, Tensor | None] = {"best_values": None, "best_orders": None}
    launches.append(merge_launch(parts, results, k, ranked=unranked, packed=True))
    return launches, (results["logprobs"], results["token_ids"], results["logsumexp"])
