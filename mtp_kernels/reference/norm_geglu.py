"""Reference of norm_geglu."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._math import linear, rms_norm


def norm_geglu(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """[g | u] = rmsnorm(x) * norm_weight @ gate_up_weight.T; gelu_tanh(g) * u, rounded once at the end."""
    gate, up = linear(rms_norm(x, norm_weight, eps), gate_up_weight).chunk(2, dim=-1)  # [..., intermediate] each
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)
