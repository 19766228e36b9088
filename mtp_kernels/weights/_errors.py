"""The one exception type for everything that can be wrong with an assistant's files or tensors."""

from __future__ import annotations

from typing import NoReturn


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the key or tensor, and what was wanted and found."""


def refuse(where: object, what: str) -> NoReturn:
    """Raise the error of `where`, a file or a module: `where: what`."""
    raise CheckpointError(f"{where}: {what}")
