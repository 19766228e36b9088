"""centroid_topk: the centroid head."""

from __future__ import annotations

import torch
from torch import Tensor

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes
from .centroid_logits import head_inputs, pytorch_candidates

CHECK = "head"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",) if config.head == "centroid" else ()


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    return Call((*head_inputs(case, config, inputs), case.topk))


def moved(call: Call) -> int:
    normed, centroids, _, head, num_active, k = call.args
    rows = normed.numel() // normed.size(-1)
    read = min(rows * num_active * (head.size(0) // centroids.size(0)), head.size(0))
    return nbytes(normed, centroids) + read * (head.size(1) * head.element_size() + 8) + rows * (k * 12 + 4)


def flops(call: Call) -> int:
    normed, centroids, _, head, num_active, _ = call.args
    return 2 * normed.numel() * (centroids.size(0) + num_active * (head.size(0) // centroids.size(0)))


def pytorch(
    normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, lm_head_weight: Tensor, num_active: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    logits, ids = pytorch_candidates(normed, centroid_weight, token_ordering, lm_head_weight, num_active)
    total = torch.logsumexp(logits.float(), -1)
    best = torch.topk(logits, k, -1)
    return best.values.float() - total.unsqueeze(-1), ids.gather(-1, best.indices), total


