"""Content checks for MTP_DEBUG=1: they read device tensors on the host, so they synchronise and are off by default.

Each finds the first offender and names it: `draft_attention: block_table[2, 5]: expected 0 to 63, got 999 (...)`.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ._checks import fail


def debug_enabled(tensor: Tensor) -> bool:
    """MTP_DEBUG=1 is set and no CUDA graph is being captured (a capture cannot read the device)."""
    if os.environ.get("MTP_DEBUG", "") not in ("1", "true", "on"):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_contents_range(op: str, name: str, tensor: Tensor | None, low: int, high: int, why: str = "",
                         where: Tensor | None = None) -> None:
    """Every element of the integer `tensor` (every one where `where` is true) lies in low..high."""
    if tensor is None:
        return
    values = tensor.long()  # a bound may not fit in int32
    bad = (values < low) | (values > high)
    if where is not None:
        bad = bad & where
    check_contents(op, name, tensor, bad, f"{low} to {high}", why)


def check_contents_finite(op: str, **tensors: Tensor | None) -> None:
    """No element of any tensor is NaN or infinite."""
    for name, tensor in tensors.items():
        if tensor is not None:
            values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
            check_contents(op, name, tensor, ~torch.isfinite(values), "a finite value")


def check_contents(op: str, name: str, tensor: Tensor, bad: Tensor, expected: str, why: str = "") -> None:
    """No element of `tensor` is marked in the mask `bad`."""
    if not bool(bad.any()):
        return
    index = torch.nonzero(bad)[0].tolist()
    got = tensor[tuple(index)].item() if index else tensor.item()
    fail(op, f"{name}{index}" if index else name, expected, got, why)
