"""What tests/gpu/sanitize.py concludes from what a tool prints; the tool itself needs a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CLEAN = "========= COMPUTE-SANITIZER\n3 passed in 1.00s\n========= ERROR SUMMARY: 0 errors\n"
FOUND = (
    "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n=========     at store_one_too"
    "_many+0x90\n3 passed in 1.00s\n========= ERROR SUMMARY: 2 errors\n"
)


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    path = Path(__file__).parent / "gpu" / "sanitize.py"
    spec = importlib.util.spec_from_file_location("sanitize", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module  # its dataclass looks there for its annotations
    spec.loader.exec_module(module)
    return module


def test_judges_by_the_summary(sanitize: ModuleType) -> None:
    clean, found = sanitize.judge(CLEAN, 0, 1.0), sanitize.judge(FOUND, 99, 1.0)
    assert (clean.errors, clean.passed, clean.messages) == (0, 3, [])
    assert (found.errors, found.passed) == (2, 3)
    assert "store_one_too_many" in found.messages[1] and len(found.messages) == 3
    silent = sanitize.judge("some trouble\n", 1, 1.0)
    assert (silent.errors, silent.passed, silent.messages) == (None, 0, ["some trouble"])


def test_every_test_is_in_one_share(sanitize: ModuleType) -> None:
    names = [str(i) for i in range(10)]
    parts = sanitize.shares(names, 4)
    assert sorted(name for part in parts for name in part) == names and len(parts) == 4
    assert sanitize.shares(["0"], 4) == [["0"]] and sanitize.shares([], 4) == []


def test_a_process_that_runs_past_its_time_is_ended(sanitize: ModuleType) -> None:
    done = sanitize.run([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 2.0)
    assert (done.exit_code, done.errors) == (None, None) and done.seconds < 20
    assert sanitize.run(["/no/such/sanitizer"], 2.0).exit_code == 127


@pytest.mark.parametrize(
    ("tests", "broken", "ok", "errors"),
    [
        ((CLEAN, 0), (FOUND, 1), True, 0),
        ((FOUND, 99), (FOUND, 1), False, 4),  # an error
        ((CLEAN, 0), (CLEAN, 0), False, 0),  # blind
        ((CLEAN, 0), (FOUND.replace("store_one_too_many", "another"), 1), False, 0),
        ((CLEAN.replace("3 passed", "2 passed, 1 failed"), 1), (FOUND, 1), False, 0),
        (("3 passed\n", 0), (FOUND, 1), False, None),  # no summary
    ],
)
def test_ok_needs_no_error_every_test_and_a_tool_that_sees(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, tests: Any, broken: Any, ok: bool, errors: int | None
) -> None:
    def run(command: list[str], timeout: float) -> Any:
        is_broken = "broken_kernels.py" in " ".join(command)
        assert command[:3] == ["compute-sanitizer", "--tool", "memcheck"]
        return sanitize.judge(*(broken if is_broken else tests), 1.0)

    monkeypatch.setattr(sanitize, "run", run)
    found = sanitize.with_tool("compute-sanitizer", "memcheck", list("abcdef"), jobs=2, timeout=1.0)
    assert (found["ok"], found["errors"]) == (ok, errors)
    assert found["command"].startswith("compute-sanitizer --tool memcheck --error-exitcode 99 ")


def test_collects_the_small_tests(sanitize: ModuleType) -> None:
    names = sanitize.collect(["-k", "test_private_kernels"])
    assert len(names) == 12 and all("test_small.py::test_private_kernels[" in name for name in names)
