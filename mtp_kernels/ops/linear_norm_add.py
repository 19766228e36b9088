"""linear_norm_add: a layer's output projection, its RMS norm, and the residual connection."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.linear_norm_add import linear_norm_add as reference
from ._checks import (
    check_device,
    check_float,
    check_last_contiguous,
    check_min_rank,
    check_scale_dtype,
    check_shape,
    require,
    show_shape,
)
from ._contents import check_contents_finite
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "linear_norm_add"
MAX_COLUMNS = 32768  # that the Triton kernel norms: a block holds a row
SCHEMA = (
    "linear_norm_add(Tensor x, Tensor? weight, Tensor norm_weight, float eps, Tensor residual, *, "
    "Tensor? scale=None) -> Tensor"
)


def linear_norm_add(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> Tensor:
    """p = x @ weight.T; y = (residual + p / sqrt(mean(p^2) + eps) * norm_weight) * scale.

    Args:
        x: [..., in], bf16, fp16 or fp32.
        weight: [out, in] as nn.Linear has it, dtype of `x`, may be a slice of rows; or None where `x` is already the
            projection (with tensor parallelism: after the all-reduce), so that out = in.
        norm_weight: [out], dtype of `x` or fp32; the plain weight w, not 1 + w.
        eps: added to the mean square; Gemma 4 uses 1e-6.
        residual: [..., out], dtype of `x`, with the leading dimensions of `x`.
        scale: one element of any rank, dtype of `x` or fp32, read on the device: Gemma 4's layer_scalar. None: 1.

    Returns:
        [..., out], dtype of `x`; accumulated in fp32 and rounded once.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device.

    >>> x, residual = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])
    >>> linear_norm_add(x, torch.eye(2), torch.ones(2), 0.0, residual, scale=torch.tensor(10.0))
    tensor([[18.4853, 21.3137]])
    """
    return torch.ops.mtp.linear_norm_add(x, weight, norm_weight, eps, residual, scale=scale)


def check(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> None:
    check_min_rank(NAME, "x", x, 1)
    check_float(NAME, "x", x)
    if weight is None:
        out, why = x.size(-1), f"x is {show_shape(x.shape)}, already projected"
    else:
        check_shape(NAME, "weight", weight, (None, x.size(-1)), f"x has {x.size(-1)} columns")
        check_float(NAME, "weight", weight, x, "x")
        out, why = weight.size(0), f"x is {show_shape(x.shape)}, weight has {weight.size(0)} rows"
    check_shape(NAME, "norm_weight", norm_weight, (out,), why)
    check_scale_dtype(NAME, "norm_weight", norm_weight, x, "x")
    check_shape(NAME, "residual", residual, (*x.shape[:-1], out), why)
    check_float(NAME, "residual", residual, x, "x")
    if scale is not None:
        require(scale.numel() == 1, NAME, "scale", "1 element", f"{scale.numel()} ({show_shape(scale.shape)})")
        check_scale_dtype(NAME, "scale", scale, x, "x")
    check_last_contiguous(NAME, x=x, weight=weight, norm_weight=norm_weight, residual=residual)
    check_device(NAME, x.device, "x", weight=weight, norm_weight=norm_weight, residual=residual, scale=scale)


def outputs(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> Spec:
    return tuple(residual.shape), x.dtype


def contents(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> None:
    check_contents_finite(NAME, x=x, weight=weight, norm_weight=norm_weight, residual=residual, scale=scale)


def serves(
    x: Tensor, weight: Tensor | None, norm_weight: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
) -> str:
    """Why the Triton kernel does not serve these arguments, or ""."""
    if x.dim() > 4:
        return f"x has {x.dim() - 1} leading dimensions, more than 3"
    if norm_weight.size(0) > MAX_COLUMNS:
        return f"a row of {norm_weight.size(0)} columns, more than {MAX_COLUMNS}, in one block"
    return "x has no columns" if x.size(-1) == 0 else ""


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)))
