"""lm_head_topk: the dense head, as it is and quantised to fp8."""

from __future__ import annotations

import torch
from torch import Tensor

from ...heads import quantize_lm_head
from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "head"
FP8 = "fp8"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("", FP8) if config.head == "dense" else ()


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    head = inputs.matrix(config.vocab, config.hidden)
    normed = inputs.normal(case.batch, case.rows, config.hidden)
    if case.variant != FP8:
        return Call((normed, head, case.topk))
    quantized, scale = quantize_lm_head(head)
    return Call((normed, quantized, case.topk), {"weight_scale": scale})


def moved(call: Call) -> int:
    normed, weight, k = call.args
    return nbytes(normed, weight, call.kwargs.get("weight_scale")) + normed.numel() // normed.size(-1) * (k * 12 + 4)


def flops(call: Call) -> int:
    normed, weight, _ = call.args
    return 2 * normed.numel() * weight.size(0)


def pytorch(
    normed: Tensor, weight: Tensor, k: int, *, weight_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(normed, weight.to(normed.dtype)).float()
    if weight_scale is not None:
        logits = logits * weight_scale
    total = torch.logsumexp(logits, -1)
    best = torch.topk(logits, k, -1)
    return best.values - total.unsqueeze(-1), best.indices, total
