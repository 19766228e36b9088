"""What the references share: accumulation in fp32 (fp64 for fp64 inputs), RMS norm, exact fp32 products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def accumulate(x: Tensor) -> Tensor:
    """`x` in the accumulation dtype: fp64 stays fp64 (the tests' oracle), everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (weight w, not 1 + w), in accumulation dtype."""
    x = accumulate(x)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in full fp32 (fp64): no TF32, no bf16 passes, whatever the process has allowed."""
    with full_precision():
        return accumulate(x) @ accumulate(y)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, weight [out, in] as nn.Linear has it, in accumulation dtype."""
    return matmul(x, weight.t())


def rank_descending(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension and their indices; NaN counts as -inf, the lowest index wins a tie."""
    values = torch.nan_to_num(values, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = torch.sort(values, dim=-1, descending=True, stable=True)
    return order.values[..., :k], order.indices[..., :k]


@contextmanager
def full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
