"""What the heads share: the exact ranking of candidate tokens, and logprobs that are never NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from ._math import no_nan, rank_descending


def topk_logprobs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k best candidates of each row: logprobs over the row's candidates, ids, and the logsumexp of the row.

    logits and ids [..., num_candidates], in any order -> [..., k], [..., k], [...].
    """
    total = log_sum_exp(logits)
    best, best_ids = rank_by_id(logits, ids, k)
    return to_logprobs(best, total), best_ids, total


def rank_by_id(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values and their ids; NaN counts as -inf, the lowest id (not the first column) wins a tie."""
    by_id = ids.argsort(dim=-1, stable=True)
    best, places = rank_descending(values.gather(-1, by_id), k)
    return best, ids.gather(-1, by_id).gather(-1, places)


def suppress(logits: Tensor, ids: Tensor, suppress_ids: Tensor | None) -> Tensor:
    """logits with -inf where the candidate's id is in suppress_ids [n]; ids [candidates], or of the shape of logits."""
    if suppress_ids is None:
        return logits
    return logits.masked_fill((ids.unsqueeze(-1) == suppress_ids).any(-1), -torch.inf)


def log_sum_exp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))) over the last dimension; NaN adds nothing, a row with nothing else gives -inf."""
    return torch.logsumexp(no_nan(logits), dim=-1)


def to_logprobs(logits: Tensor, total: Tensor) -> Tensor:
    """logits [..., k] minus their row's logsumexp [...], at most 0.

    -inf stays -inf. A logit of +inf is certain, with logprob 0, and all finite ones beside it get -inf: the same
    whether the row was normalised at once or in shards.
    """
    logprobs = (logits - total.unsqueeze(-1)).clamp(max=0)
    return logprobs.masked_fill(logits == torch.inf, 0.0).masked_fill(logits == -torch.inf, -torch.inf)
