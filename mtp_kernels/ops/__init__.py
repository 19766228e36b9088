"""Every op of `torch.ops.mtp`: importing this package registers them all; each name is also a documented function."""

from __future__ import annotations

from ._checks import ArgumentError
from ._registry import OPS
from .norm_linear import norm_linear

__all__ = [
    "OPS",
    "ArgumentError",
    "norm_linear",
]
