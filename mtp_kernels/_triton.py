"""Finds the Triton kernels; says why one is absent. Importing this imports no Triton."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1), which serves the CPU for tests."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def triton_op(name: str) -> Callable[..., Any]:
    """The launcher `mtp_kernels.triton_ops.<name>.<name>`; ImportError with the reason where Triton is missing."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ImportError(f"Triton cannot be imported ({error}): pip install 'mtp-kernels[triton]'") from None
    return getattr(importlib.import_module(f".triton_ops.{name}", __package__), name)
