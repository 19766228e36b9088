"""Whether two strided tensors share a byte: exactly, by numpy's bounded solver, never by touching the memory."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def overlaps(a: Tensor, b: Tensor) -> bool:
    """True when some element of `a` and some element of `b` share memory (any device; nothing is read)."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    a_first, a_last = _bounds(a)
    b_first, b_last = _bounds(b)
    if a_last <= b_first or b_last <= a_first:
        return False
    return bool(np.shares_memory(_as_array(a), _as_array(b)))


def _bounds(t: Tensor) -> tuple[int, int]:
    """Address of the first byte, and one past the last byte (strides of a tensor are never negative)."""
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (span + 1) * t.element_size()


class _Address:
    def __init__(self, t: Tensor) -> None:
        size = t.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(t.shape),
            "strides": tuple(s * size for s in t.stride()),
            "data": (t.data_ptr(), False),
        }


def _as_array(t: Tensor) -> np.ndarray:
    return np.asarray(_Address(t))
