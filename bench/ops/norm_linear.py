"""norm_linear: a layer's query projection."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "floats"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(config.layer_types))


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    out = config.num_qo_heads * config.attention_of(case.variant).head_dim
    x = inputs.normal(case.batch, case.rows, config.hidden)
    return Call((x, inputs.norm(config.hidden), config.norm_eps, inputs.matrix(out, config.hidden)))


def moved(call: Call) -> int:
    x, norm_weight, _, weight = call.args
    return nbytes(x, norm_weight, weight) + x.numel() // x.size(-1) * weight.size(0) * x.element_size()


def flops(call: Call) -> int:
    x, _, _, weight = call.args
    return 2 * x.numel() * weight.size(0)


def pytorch(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (x.size(-1),), norm_weight, eps), weight)
