"""post_project: the final norm and the projection back to the target's width."""

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
    return Call((x, inputs.norm(config.hidden), config.norm_eps, inputs.matrix(config.backbone, config.hidden)))


def moved(call: Call) -> int:
    x, norm_weight, _, weight = call.args
    state = x.numel() // x.size(-1) * weight.size(0) * x.element_size()
    return nbytes(x, x, norm_weight, weight) + state  # normed is as large as x


def flops(call: Call) -> int:
    x, _, _, weight = call.args
    return 2 * x.numel() * weight.size(0)


def pytorch(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed = F.rms_norm(x, (x.size(-1),), norm_weight, eps)
    return normed, F.linear(normed, weight)
