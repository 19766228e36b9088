"""Reference of norm_linear."""

from __future__ import annotations

from torch import Tensor

from ._math import linear, rms_norm


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """rmsnorm(x) * norm_weight @ weight.T, rounded once at the end."""
    return linear(rms_norm(x, norm_weight, eps), weight).to(x.dtype)  # [..., out]
