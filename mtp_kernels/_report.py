"""Which implementation serves each op here, and why the others do not; whether an op serves a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .ops import OPS, ArgumentError
from .ops._registry import IMPLEMENTATIONS


@dataclass(frozen=True)
class OpReport:
    """One op on one device type: what serves it, and for each other implementation why it does not."""

    op: str
    device: str
    serves: str
    why_not: dict[str, str]


@dataclass(frozen=True)
class Report:
    """The answer of `report()`; `str()` of it is a table, `rows` its data."""

    torch_version: str
    devices: tuple[str, ...]
    rows: tuple[OpReport, ...]

    def __str__(self) -> str:
        lines = [f"torch {self.torch_version}; devices: {', '.join(self.devices)}"]
        lines.append(f"{'op':<18}{'device':<8}{'served by':<12}why not the others")
        for row in self.rows:
            why = "; ".join(f"{name}: {reason}" for name, reason in row.why_not.items())
            lines.append(f"{row.op:<18}{row.device:<8}{row.serves:<12}{why}")
        return "\n".join(lines)


def report() -> Report:
    """What serves each op on the devices of this machine (nothing is launched; CUDA is only asked whether it is there).

    An implementation that serves only some arguments is listed as serving; `supports()` answers for one shape.

    >>> {row.op for row in report().rows} == set(OPS)
    True
    """
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    rows = tuple(_report_op(name, device) for name in OPS for device in devices)
    return Report(torch.__version__, devices, rows)


def _report_op(name: str, device: str) -> OpReport:
    op = OPS[name]
    serves = "reference"
    why_not: dict[str, str] = {}
    for kernel in op.kernels:  # in the order in which the chooser asks them
        if device not in kernel.devices:
            why = f"does not run on {device}"
        elif isinstance(reason := op.kernel(kernel), str):
            why = reason
        elif serves == "reference":
            serves = kernel.implementation
            continue
        else:
            why = f"{serves} comes first"
        why_not[kernel.implementation] = why
    if serves != "reference":
        why_not["reference"] = f"{serves} comes first"
    others = [i for i in IMPLEMENTATIONS if i != serves]
    return OpReport(name, device, serves, {i: why_not.get(i, "no kernel for this op") for i in others})


def supports(op: str, **shape: Any) -> tuple[bool, str]:
    """Whether `op` serves calls of this shape, and the reason: to be asked when an engine loads a model.

    Args:
        op: the op's name, for example "draft_attention".
        shape: what the calls will look like, by the names of the op's arguments and sizes (head_dim, num_qo_heads,
            dtype, ...); each op's docstring lists the ones that decide. Names that an op does not know raise
            ArgumentError.

    Returns:
        (True, "") or (False, reason).

    >>> supports("norm_linear", dtype=torch.bfloat16)
    (True, '')
    """
    if op not in OPS:
        raise ArgumentError(f"supports: op: expected one of {', '.join(sorted(OPS))}, got {op!r}")
    why = _common_reason(shape)
    if why:
        return False, why
    decide = OPS[op].supports
    rest = {k: v for k, v in shape.items() if k not in ("dtype", "device")}
    if decide is None:
        if rest:
            raise ArgumentError(f"supports: {op}: {next(iter(rest))}: expected dtype or device, got an unknown name")
        return True, ""
    try:
        why = decide(**rest)
    except TypeError as error:
        raise ArgumentError(f"supports: {op}: {error}") from error
    return not why, why


def _common_reason(shape: dict[str, Any]) -> str:
    from .ops._checks import FLOATS, show_dtypes

    dtype = shape.get("dtype")
    if dtype is not None and dtype not in FLOATS:
        return f"dtype {show_dtypes([dtype])} is not {show_dtypes(FLOATS)}"
    return ""
