"""norm_geglu: the kernel of norm_linear with two weight tiles a program, whose products end in gelu_tanh(g) * u."""

from __future__ import annotations

from torch import Tensor

from ._launch import Launch
from .norm_linear import norm_linear_launch


def norm_geglu(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    launches, output = plan(x, norm_weight, eps, gate_up_weight)
    for launch in launches:
        launch.run()
    return output


def plan(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> tuple[list[Launch], Tensor]:
    """The launches and the result that they write."""
    output = x.new_empty((*x.shape[:-1], gate_up_weight.size(0) // 2))
    return [norm_linear_launch(x, norm_weight, eps, gate_up_weight, output, gated=True)], output
