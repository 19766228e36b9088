"""Which implementations serve the ops that a function calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops import OPS
from ..ops._registry import choose


def served_by(function: Callable[[], Any]) -> str:
    """One name, or several joined by +, from one call of the function. Where it raises: of the ops until then."""
    watch = _Watch()
    with suppress(Exception), torch.no_grad(), watch:  # what is wrong is found again when the function is checked
        function()
    return "+".join(sorted(watch.names))


class _Watch(TorchDispatchMode):
    """Asks the chooser what it will take, at every call of an op of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "mtp":
            self.names.add(choose(OPS[func._opname], args, kwargs)[0])
        return func(*args, **kwargs)
