"""norm_geglu: RMS norm, the merged gate and up projections, and their gated product."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.norm_geglu import norm_geglu as reference
from ._checks import (
    check_device,
    check_float,
    check_last_contiguous,
    check_min_rank,
    check_scale_dtype,
    check_shape,
    require,
)
from ._contents import check_contents_finite
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "norm_geglu"
SCHEMA = "norm_geglu(Tensor x, Tensor norm_weight, float eps, Tensor gate_up_weight) -> Tensor"


def norm_geglu(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """[g | u] = (x / sqrt(mean(x^2) + eps) * norm_weight) @ gate_up_weight.T; y = gelu_tanh(g) * u.

    gelu_tanh(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))), "gelu_pytorch_tanh" in Gemma 4's
    configuration, taken in fp32 of the unrounded g.

    Args:
        x: [..., in], bf16, fp16 or fp32.
        norm_weight: [in], dtype of `x` or fp32; the plain weight w, not 1 + w.
        eps: added to the mean square; Gemma 4 uses 1e-6.
        gate_up_weight: [2 * intermediate, in], dtype of `x`: the gate's rows, then up's; may be a slice of rows.

    Returns:
        [..., intermediate], dtype of `x`; accumulated in fp32 and rounded once.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device; an odd number of rows of `gate_up_weight`.

    >>> x, gate_up_weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> norm_geglu(x, torch.ones(2), 0.0, gate_up_weight)
    tensor([[0.7697]])
    """
    return torch.ops.mtp.norm_geglu(x, norm_weight, eps, gate_up_weight)


def check(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> None:
    check_min_rank(NAME, "x", x, 1)
    check_float(NAME, "x", x)
    check_shape(NAME, "norm_weight", norm_weight, (x.size(-1),), f"x has {x.size(-1)} columns")
    check_scale_dtype(NAME, "norm_weight", norm_weight, x, "x")
    check_shape(NAME, "gate_up_weight", gate_up_weight, (None, x.size(-1)), f"x has {x.size(-1)} columns")
    rows = gate_up_weight.size(0)
    require(rows % 2 == 0, NAME, "gate_up_weight", "an even number of rows", rows, "the gate's, then as many of up")
    check_float(NAME, "gate_up_weight", gate_up_weight, x, "x")
    check_last_contiguous(NAME, x=x, norm_weight=norm_weight, gate_up_weight=gate_up_weight)
    check_device(NAME, x.device, "x", norm_weight=norm_weight, gate_up_weight=gate_up_weight)


def outputs(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Spec:
    return (*x.shape[:-1], gate_up_weight.size(0) // 2), x.dtype


def contents(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> None:
    check_contents_finite(NAME, x=x, norm_weight=norm_weight, gate_up_weight=gate_up_weight)


def serves(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> str:
    """Why the Triton kernel does not serve these arguments, or ""."""
    if x.dim() > 4:
        return f"x has {x.dim() - 1} leading dimensions, more than 3"
    return "x has no columns" if x.size(-1) == 0 else ""


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)))
