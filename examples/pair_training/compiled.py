"""torch.compile where it works, plain PyTorch where it does not: a failed compile must not end a long run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Compiled:
    """`fn` compiled for fixed shapes; after a failure in a first call it is `fn` itself."""

    def __init__(self, fn: Callable[..., Any], enabled: bool) -> None:
        self._plain = fn
        self._fast: Callable[..., Any] | None = None
        self._calls = 0
        if enabled:
            torch._functorch.config.force_non_lazy_backward_lowering = True  # else a backward fails outside this class
            self._fast = torch.compile(fn, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        if self._fast is None:
            return self._plain(*args)
        try:
            out = self._fast(*args)
            self._calls += 1
            return out
        except Exception as error:
            if self._calls:
                raise
            print(f"compiling {self._plain.__name__} failed, running it plain: {type(error).__name__}: {error}"[:600])
            self._fast = None
            return self._plain(*args)
