"""Fused kernels for frozen-KV MTP drafting: `torch.ops.mtp.*` and a thin draft loop.

Importing this registers the ops. It touches no GPU and imports no Triton.
"""

from __future__ import annotations

from . import ops
from ._report import report, supports
from .ops import ArgumentError

__all__ = ["ArgumentError", "ops", "report", "supports"]
__version__ = "0.1.0"
