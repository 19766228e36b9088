"""Finds and loads the compiled libraries; says why one is absent. Importing this loads no library and no CUDA."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "lib"
_loaded: dict[str, str] = {}


def cpu_library() -> str:
    """Load the CPU library once; "" when it is there, else the reason why it is not."""
    return _library("cpu")


def cpu_op(name: str) -> Callable[..., Any]:
    """The private op `mtp_cpu::<name>`; ImportError with the reason where the library has none."""
    return _op("cpu", cpu_library(), name)


def cuda_library() -> str:
    """Load the CUDA library once; "" when it is there, else the reason why it is not."""
    return _library("cuda")


def cuda_op(name: str) -> Callable[..., Any]:
    """The private op `mtp_cuda::<name>`; ImportError with the reason where the library has none."""
    return _op("cuda", cuda_library(), name)


def why_not_built(part: str) -> str:
    """Why setup.py left the part ("cpu", "host", "cuda") out when this was built; "" where it built it."""
    try:
        info = json.loads((FOLDER / "build.json").read_text())
    except (OSError, ValueError):
        return "this source tree has not been built: `make build` does"
    return str(info.get(part, f"this build knows no {part}"))


def _library(part: str) -> str:
    if part not in _loaded:
        _loaded[part] = _load(part, FOLDER / f"libmtp_{part}.so")
    return _loaded[part]


def _op(part: str, why: str, name: str) -> Callable[..., Any]:
    if why:
        raise ImportError(why)
    ops = getattr(torch.ops, f"mtp_{part}")
    if not hasattr(ops, name):
        raise ImportError(f"the {part.upper()} library has no {name}")
    return getattr(ops, name).default


def _load(part: str, path: Path) -> str:
    if not path.exists():
        return f"the {part.upper()} library is missing: {why_not_built(part) or f'{path.name} was removed'}"
    if part == "cuda" and torch.version.cuda is None:
        return "this torch was built without CUDA"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"the {part.upper()} library does not load: {error.__cause__ or error}"
    return ""
