"""post_project: the kernel of norm_linear, which norms first and leaves the normed rows too."""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import Launch
from .norm_linear import norm_linear_launch


def post_project(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    launches, results = plan(x, norm_weight, eps, weight)
    for launch in launches:
        launch.run()
    return results


def plan(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """The launches and the results that they write."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # contiguous, whatever the strides of x
    state = x.new_empty((*x.shape[:-1], weight.size(0)))
    return [norm_linear_launch(x, norm_weight, eps, weight, state, normed=normed)], (normed, state)
