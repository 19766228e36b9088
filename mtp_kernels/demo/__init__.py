"""`mtp-kernels demo`: the example pair decodes a held-out prompt, drafting with this library."""

from __future__ import annotations

from .command import add_arguments, run
from .pair import DemoError

__all__ = ["DemoError", "add_arguments", "run"]
