"""norm_linear: RMS norm and a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.norm_linear import norm_linear as reference
from ._checks import (
    check_device,
    check_float,
    check_last_contiguous,
    check_min_rank,
    check_scale_dtype,
    check_shape,
)
from ._contents import check_contents_finite
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "norm_linear"
SCHEMA = "norm_linear(Tensor x, Tensor norm_weight, float eps, Tensor weight) -> Tensor"


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """y = (x / sqrt(mean(x^2) + eps) * norm_weight) @ weight.T: a layer's query projection.

    Args:
        x: [..., in], bf16, fp16 or fp32.
        norm_weight: [in], dtype of `x` or fp32; the plain weight w, not 1 + w.
        eps: added to the mean square; Gemma 4 uses 1e-6.
        weight: [out, in] as nn.Linear has it, dtype of `x`; may be a slice of rows.

    Returns:
        [..., out], dtype of `x`; accumulated in fp32 and rounded once.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device.

    >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.eye(2)
    >>> norm_linear(x, torch.ones(2), 0.0, weight)
    tensor([[0.8485, 1.1314]])
    """
    return torch.ops.mtp.norm_linear(x, norm_weight, eps, weight)


def check(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> None:
    check_min_rank(NAME, "x", x, 1)
    check_float(NAME, "x", x)
    check_shape(NAME, "norm_weight", norm_weight, (x.size(-1),), f"x has {x.size(-1)} columns")
    check_scale_dtype(NAME, "norm_weight", norm_weight, x, "x")
    check_shape(NAME, "weight", weight, (None, x.size(-1)), f"x has {x.size(-1)} columns")
    check_float(NAME, "weight", weight, x, "x")
    check_last_contiguous(NAME, x=x, norm_weight=norm_weight, weight=weight)
    check_device(NAME, x.device, "x", norm_weight=norm_weight, weight=weight)


def outputs(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Spec:
    return (*x.shape[:-1], weight.size(0)), x.dtype


def contents(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> None:
    check_contents_finite(NAME, x=x, norm_weight=norm_weight, weight=weight)


def serves(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> str:
    """Why the Triton kernel does not serve these arguments, or ""."""
    if x.dim() > 4:
        return f"x has {x.dim() - 1} leading dimensions, more than 3"
    return "x has no columns" if x.size(-1) == 0 else ""


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)))
