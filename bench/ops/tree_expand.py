"""tree_expand: the next frontier of a tree, in the middle of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "exact"
TOPK = 4


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    rows = case.rows if case.rows > 1 else TOPK
    logprobs = -inputs.uniform(case.batch, rows, rows).sort(-1).values * 8
    ids = inputs.integers(config.vocab, case.batch, rows, rows)
    frontier = inputs.integers(rows, case.batch, rows)
    return Call((logprobs, ids, rows), {"scores": -inputs.uniform(case.batch, rows), "frontier": frontier})


def moved(call: Call) -> int:
    logprobs, ids, _ = call.args
    results = logprobs.numel() * 12 + logprobs.size(0) * logprobs.size(2) * 28
    return nbytes(logprobs, ids, *call.kwargs.values()) + results


def flops(call: Call) -> int:
    return call.args[0].numel()


def pytorch(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor, frontier: Tensor
) -> tuple[Tensor, ...]:
    cand_scores = (scores.unsqueeze(-1) + logprobs).flatten(1)  # [batch, rows * k]
    k = logprobs.size(2)
    best = torch.topk(cand_scores, k, -1)
    row = best.indices // k
    cand_parent = frontier.unsqueeze(-1).expand(-1, -1, k).flatten(1)
    ids = token_ids.flatten(1).gather(1, best.indices)
    return ids, row, best.values, best.indices + cand_offset, cand_scores, cand_parent
