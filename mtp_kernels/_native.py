"""Finds and loads the compiled libraries; says why one is absent. Importing this loads no CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_CPU_LIBRARY = Path(__file__).parent / "lib" / "libmtp_cpu.so"
_loaded: dict[str, str] = {}


def cpu_library() -> str:
    """Load the CPU library once; "" when it is there, else the reason why it is not."""
    if "cpu" not in _loaded:
        _loaded["cpu"] = _load(_CPU_LIBRARY)
    return _loaded["cpu"]


def cpu_op(name: str) -> Callable[..., Any]:
    """The private op `mtp_cpu::<name>`; ImportError with the reason where the library has none."""
    why = cpu_library()
    if why:
        raise ImportError(why)
    if not hasattr(torch.ops.mtp_cpu, name):
        raise ImportError(f"the CPU library has no {name}")
    return getattr(torch.ops.mtp_cpu, name).default


def _load(path: Path) -> str:
    if not path.exists():
        return f"the CPU library was not built ({path.name} is missing)"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"the CPU library does not load: {error}"
    return ""
