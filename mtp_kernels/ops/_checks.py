"""Argument checks shared by every op: each failure names the op, the argument, what it wants and what it got.

Only sizes, dtypes, strides and devices are looked at, never contents, so a check costs no synchronisation and runs
in fake tensors as well. Contents are checked by `_contents`, on request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn,)
INDICES = (torch.int32, torch.int64)


class ArgumentError(ValueError):
    """An argument of a `torch.ops.mtp` op is wrong: the only exception type their checks raise.

    The message reads `op: argument: expected X, got Y (why)`.
    """


class ImplementationError(RuntimeError):
    """The implementation that MTP_FORCE_IMPL names does not serve a call; the message says why."""


def fail(op: str, name: str, expected: object, got: object, why: str = "") -> None:
    """Raise the error of argument `name`: `op: name: expected E, got G (why)`."""
    raise ArgumentError(f"{op}: {name}: expected {expected}, got {got}" + (f" ({why})" if why else ""))


def require(ok: bool, op: str, name: str, expected: object, got: object, why: str = "") -> None:
    if not ok:
        fail(op, name, expected, got, why)


def show_shape(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("*" if n is None else str(n) for n in shape) + "]"


def show_dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_rank(op: str, name: str, tensor: Tensor, *ranks: int) -> None:
    """`tensor` has one of the `ranks`."""
    if tensor.dim() not in ranks:
        fail(op, name, " or ".join(f"{r} dimensions" for r in ranks), f"{tensor.dim()} ({show_shape(tensor.shape)})")


def check_min_rank(op: str, name: str, tensor: Tensor, rank: int) -> None:
    if tensor.dim() < rank:
        fail(op, name, f"at least {rank} dimensions", f"{tensor.dim()} ({show_shape(tensor.shape)})")


def check_shape(op: str, name: str, tensor: Tensor, want: Sequence[int | None], why: str = "") -> None:
    """`tensor.shape` equals `want`, where None stands for any size."""
    shape = tensor.shape
    if len(shape) == len(want):
        for n, w in zip(shape, want):
            if w is not None and w != n:
                break
        else:
            return
    fail(op, name, show_shape(want), show_shape(shape), why)


def check_dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype], why: str = "") -> None:
    if tensor.dtype not in allowed:
        fail(op, name, show_dtypes(allowed), show_dtypes([tensor.dtype]), why)


def check_float(op: str, name: str, tensor: Tensor, like: Tensor | None = None, like_name: str = "") -> None:
    """`tensor` is bf16, fp16 or fp32, and has the dtype of `like` where one is given."""
    if like is None:
        check_dtype(op, name, tensor, FLOATS)
    elif tensor.dtype != like.dtype:  # no message is put together before it is needed
        check_dtype(op, name, tensor, (like.dtype,), f"{like_name} is {show_dtypes([like.dtype])}")


def check_scale_dtype(op: str, name: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    """A norm weight or a scalar scale: the dtype of `like`, or fp32 beside it."""
    if tensor.dtype != like.dtype and tensor.dtype != torch.float32:
        allowed = tuple(dict.fromkeys((like.dtype, torch.float32)))
        check_dtype(op, name, tensor, allowed, f"{like_name} is {show_dtypes([like.dtype])}")


def check_index(op: str, name: str, tensor: Tensor) -> None:
    check_dtype(op, name, tensor, INDICES)


def check_last_contiguous(op: str, **tensors: Tensor | None) -> None:
    """Every tensor's last dimension has stride 1 (a size of 0 or 1 has no stride that matters)."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.size(-1) > 1:
            fail(op, name, "a contiguous last dimension", f"strides {show_shape(tensor.stride())}")


def check_device(op: str, device: torch.device, device_of: str, **tensors: Tensor | None) -> None:
    """Every tensor lies on `device`, the one of argument `device_of`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            fail(op, name, device, tensor.device, f"{device_of} is on {device}")


def check_range(op: str, name: str, value: int, low: int, high: int | None = None, why: str = "") -> None:
    """The host integer `value` lies in low..high (no upper end: high None)."""
    if value < low or (high is not None and value > high):
        fail(op, name, f"at least {low}" if high is None else f"{low} to {high}", value, why)
