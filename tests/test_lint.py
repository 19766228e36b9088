"""The linters over the repository: a finding fails a test."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "csrc", ROOT / "tests" / "emulation")
CPP = sorted(p for folder in FOLDERS for p in folder.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def tool(name: str) -> str:
    """The tool of this environment, or of PATH; it is part of the [test] extra."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def test_ruff() -> None:
    run(tool("ruff"), "check", ".")


def test_mypy() -> None:
    assert importlib.util.find_spec("mypy") is not None, "mypy is not installed"
    run(sys.executable, "-m", "mypy")


def test_clang_format() -> None:
    assert CPP
    run(tool("clang-format"), "--dry-run", "-Werror", *map(str, CPP))
