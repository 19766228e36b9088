"""sample_logits: one draw a row from the candidates of the model's head."""

from __future__ import annotations

import torch

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "exact"
pytorch = None  # its noise is this library's own, so no other draw can be compared


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    rows = case.batch * case.rows
    logits = inputs.normal(rows, config.num_candidates, dtype=torch.float32)
    temperature = torch.full((rows,), 0.8, device=inputs.device)
    return Call((logits, temperature, inputs.integers(2**31, rows), inputs.integers(2**31, rows)))


def moved(call: Call) -> int:
    return nbytes(*call.args) + call.args[0].size(0) * 12


def flops(call: Call) -> int:
    return 4 * call.args[0].numel()
