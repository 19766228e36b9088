"""Reference of sample_logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ._math import accumulate, no_nan
from ._philox import gumbel_noise
from ._rank import to_logprobs

NO_ID = torch.iinfo(torch.int64).max


def sample_logits(
    logits: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, *, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """argmax of logits / temperature + Gumbel noise, which is one draw from softmax(logits / temperature)."""
    if token_ids is None:
        token_ids = torch.arange(logits.size(1), device=logits.device)
    ids = token_ids.long().expand(logits.shape)
    warm = temperature.unsqueeze(-1) > 0  # [n or 1, 1]; False for NaN
    scaled = _below_best(no_nan(accumulate(logits)), torch.where(warm, temperature.unsqueeze(-1), 1.0))  # [n, m]
    noise = gumbel_noise(seed.unsqueeze(-1), offset.unsqueeze(-1), token_ids, scaled.dtype)  # [n or 1, m]

    noisy = scaled + torch.where(warm, noise, 0.0)
    best = noisy == noisy.amax(-1, keepdim=True)
    sampled = ids.masked_fill(~best, NO_ID).amin(-1)  # [n]
    drawn = best & (ids == sampled.unsqueeze(-1))
    value = scaled.masked_fill(~drawn, -torch.inf).amax(-1, keepdim=True)
    return sampled, to_logprobs(value, torch.logsumexp(scaled, -1)).squeeze(-1)


def _below_best(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - the row's largest) / temperature: the largest gives exactly 0, whatever the temperature.

    Dividing first could overflow. Infinities get their limits: -inf stays -inf, and beside +inf all others become -inf.
    """
    best = logits.amax(-1, keepdim=True)
    below = (logits - best).masked_fill(logits == best, 0.0).masked_fill(logits == -torch.inf, -torch.inf)
    return (below / temperature).masked_fill(below == -torch.inf, -torch.inf)
