"""Reference of post_project."""

from __future__ import annotations

from torch import Tensor

from ._math import linear, rms_norm


def post_project(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """normed = rmsnorm(x) * norm_weight, rounded; state = normed @ weight.T of the rounded normed, rounded."""
    normed = rms_norm(x, norm_weight, eps).to(x.dtype)  # [..., in]
    return normed, linear(normed, weight).to(x.dtype)
