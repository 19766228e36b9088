"""Reference of lm_head_topk."""

from __future__ import annotations

import torch
from torch import Tensor

from ._math import accumulate, linear, rank_descending
from ._rank import log_sum_exp, rank_by_id, suppress, to_logprobs

CHUNK_ELEMENTS = 2**23  # of the weight converted at a time: 32 MiB in fp32, where a whole Gemma 4 head is 1 GiB


def lm_head_topk(
    normed: Tensor,
    weight: Tensor,
    k: int,
    *,
    weight_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    vocab_start: int = 0,
    logits_soft_cap: float = 0.0,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best rows of the head, in one pass over chunks of rows with a running top-k and logsumexp."""
    num_rows, hidden = weight.shape
    chunk = max(1, CHUNK_ELEMENTS // max(hidden, 1))
    if token_map is None:
        token_map = torch.arange(num_rows, device=weight.device) + vocab_start
    best = accumulate(normed).new_empty((*normed.shape[:-1], 0))
    best_ids = torch.empty_like(best, dtype=torch.int64)
    total = best.new_full(normed.shape[:-1], -torch.inf)

    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        scale = None if weight_scale is None else weight_scale[rows]
        logits = _logits(normed, weight[rows], scale, logits_soft_cap)  # [..., chunk]
        logits = suppress(logits, token_map[rows], suppress_ids)
        total = torch.logaddexp(total, log_sum_exp(logits))
        ids, by_id = token_map[rows].long().sort(stable=True)  # rank_descending then prefers the lowest id
        values, places = rank_descending(logits[..., by_id], k)
        best, best_ids = rank_by_id(torch.cat([best, values], -1), torch.cat([best_ids, ids[places]], -1), k)
    return to_logprobs(best, total), best_ids, total


def _logits(normed: Tensor, weight: Tensor, scale: Tensor | None, soft_cap: float) -> Tensor:
    logits = linear(normed, weight)
    if scale is not None:
        logits = logits * scale
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap > 0 else logits
