"""Reference of centroid_topk."""

from __future__ import annotations

from torch import Tensor

from ._rank import topk_logprobs
from .centroid_logits import centroid_logits


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
    """The k best of the candidates of centroid_logits, normalised over the row's candidates alone."""
    logits, token_ids = centroid_logits(
        normed, centroid_weight, token_ordering, lm_head_weight, num_active, centroid_ordered=centroid_ordered,
        suppress_ids=suppress_ids,
    )
    return topk_logprobs(logits, token_ids, k)
