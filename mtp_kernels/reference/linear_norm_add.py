"""Reference of linear_norm_add."""

from __future__ import annotations

from torch import Tensor

from ._math import accumulate, linear, rms_norm


def linear_norm_add(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> Tensor:
    """(residual + rmsnorm(x @ weight.T) * norm_weight) * scale, rounded once at the end."""
    projected = x if weight is None else linear(x, weight)  # [..., out]
    y = accumulate(residual) + rms_norm(projected, norm_weight, eps)
    if scale is not None:
        y = y * scale.reshape(()).to(y.dtype)
    return y.to(x.dtype)
