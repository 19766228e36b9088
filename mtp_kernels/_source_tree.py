"""Running from the repository: `triton_ops/`, `bench/` and `examples/pair/` are importable under their installed names.

An installed package has them inside; nothing here does anything then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

FOLDERS = {"triton_ops": ".", "bench": ".", "pair": "examples"}


class SourceTreeFinder(MetaPathFinder):
    """Finds mtp_kernels.<name> in the folder of the repository that installs under that name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != "mtp_kernels" or name not in FOLDERS:
            return None
        return PathFinder.find_spec(fullname, [str(self.root / FOLDERS[name])])


def install(init_file: str) -> None:
    """Add the finder, once, when `init_file` is the repository's mtp_kernels/__init__.py."""
    root = Path(init_file).resolve().parents[1]
    in_tree = (root / "setup.py").is_file() and (root / "triton_ops").is_dir()
    if in_tree and not any(isinstance(finder, SourceTreeFinder) for finder in sys.meta_path):
        sys.meta_path.append(SourceTreeFinder(root))
