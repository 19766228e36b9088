"""Compiles the source of a CUDA kernel for this CPU, beside another device.h (emulation/)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
CUDA = HERE.parent / "csrc" / "cuda"


def compiled(name: str, folder: Path) -> ctypes.CDLL:
    """The library of emulation/<name>.cpp, made in an empty folder."""
    for path in (*CUDA.glob("*.h"), *(HERE / "emulation").iterdir()):  # the latter stand in for some of the former
        shutil.copy(path, folder)
    library = folder / f"{name}.so"
    compiler = os.environ.get("CXX", "c++")
    options = ["-O2", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
    options += ["-U_FORTIFY_SOURCE"]  # it refuses to jump to another stack
    subprocess.run([compiler, *options, folder / f"{name}.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library))
