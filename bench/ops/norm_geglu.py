"""norm_geglu: the first half of a layer's MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "floats"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    x = inputs.normal(case.batch, case.rows, config.hidden)
    gate_up = inputs.matrix(2 * config.intermediate, config.hidden)
    return Call((x, inputs.norm(config.hidden), config.norm_eps, gate_up))


def moved(call: Call) -> int:
    x, norm_weight, _, weight = call.args
    return nbytes(x, norm_weight, weight) + x.numel() // x.size(-1) * weight.size(0) // 2 * x.element_size()


def flops(call: Call) -> int:
    x, _, _, weight = call.args
    return 2 * x.numel() * weight.size(0)


def pytorch(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    normed = F.rms_norm(x, (x.size(-1),), norm_weight, eps)
    gate, up = F.linear(normed, gate_up_weight).chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
