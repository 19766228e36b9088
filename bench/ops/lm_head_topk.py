"""lm_head_topk: the dense head."""

from __future__ import annotations

import torch
from torch import Tensor

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "head"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",) if config.head == "dense" else ()


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    head = inputs.matrix(config.vocab, config.hidden)
    return Call((inputs.normal(case.batch, case.rows, config.hidden), head, case.topk))


def moved(call: Call) -> int:
    normed, weight, k = call.args
    return nbytes(normed, weight) + normed.numel() // normed.size(-1) * (k * 12 + 4)


def flops(call: Call) -> int:
    normed, weight, _ = call.args
    return 2 * normed.numel() * weight.size(0)


def pytorch(normed: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(normed, weight).float()
    total = torch.logsumexp(logits, -1)
    best = torch.topk(logits, k, -1)
    return best.values - total.unsqueeze(-1), best.indices, total
