"""What the references share: accumulation in fp32 (fp64 for fp64 inputs), RMS norm, exact fp32 products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    order = torch.sort(no_nan(values), dim=-1, descending=True, stable=True)
    return order.values[..., :k], order.indices[..., :k]


def no_nan(values: Tensor) -> Tensor:
    """NaN becomes -inf, everything else stays."""
    return torch.nan_to_num(values, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 products in fp32 inside the block, and the process's own settings again behind it.

    Only the settings by backend are used: the older torch.get_float32_matmul_precision() raises in a process that has
    set them, while these show what either way of setting has done.
    """
    mkldnn: Any = torch.backends.mkldnn  # its stub names no `matmul`
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    lowered = [(backend, p) for backend, p in zip(backends, before) if p not in ("ieee", "none")]
    for backend, _ in lowered:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in lowered:
            backend.fp32_precision = "none"  # inherit; set only what was not inherited, so that inheritance goes on
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision
