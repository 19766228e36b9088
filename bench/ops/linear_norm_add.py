"""linear_norm_add: the output projection of attention, and the second half of the MLP with the layer's scalar."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "floats"
DOWN = "down"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return (*dict.fromkeys(config.layer_types), DOWN)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    if case.variant == DOWN:
        inner, scale = config.intermediate, inputs.norm(1)
    else:
        inner, scale = config.num_qo_heads * config.attention_of(case.variant).head_dim, None
    x = inputs.normal(case.batch, case.rows, inner)
    residual = inputs.normal(case.batch, case.rows, config.hidden)
    weight = inputs.matrix(config.hidden, inner)
    return Call((x, weight, inputs.norm(config.hidden), config.norm_eps, residual), {"scale": scale})


def moved(call: Call) -> int:
    x, weight, norm_weight, _, residual = call.args
    return nbytes(x, weight, norm_weight, residual, residual)  # the result is as large as the residual


def flops(call: Call) -> int:
    x, weight, *_ = call.args
    return 2 * x.numel() * weight.size(0)


def pytorch(
    x: Tensor, weight: Tensor, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> Tensor:
    y = residual + F.rms_norm(F.linear(x, weight), (weight.size(0),), norm_weight, eps)
    return y if scale is None else y * scale
