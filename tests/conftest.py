"""One process-wide set-up: which package is under test, few threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pairwise import meet_all_values

import mtp_kernels
from mtp_kernels._triton import interpreting

ROOT = Path(__file__).resolve().parents[1]

# Started first, so that at the end no process works on one of them while the others have nothing left: the files that
# take a minute or more of a processor, the longest first.
LONGEST = (
    "test_triton_attention", "test_triton_interpret", "test_triton_gemm", "test_triton_heads", "test_simulate",
    "test_triton_interpret_heads", "test_triton_round", "test_generate_sampling", "test_triton_interpret_attention",
    "test_lint",
)

torch.set_num_threads(2)

if interpreting():
    from quick_interpreter import quicken

    quicken()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Two threads on busy cores wait for each other at every one of many short operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_configure() -> None:
    """The tests test what is installed; the repository's own folder only where somebody asked for it."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    asked_for = os.environ.get("MTP_TEST_SOURCE") == "1" or ROOT in (Path(p).resolve() for p in paths if p)
    if Path(mtp_kernels.__file__).resolve().parent == ROOT / "mtp_kernels" and not asked_for:
        raise pytest.UsageError(
            "mtp_kernels would come from the repository's folder, not from an installed package: "
            "run `make test`, or set MTP_TEST_SOURCE=1 to test the folder"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the cases in which an implementation would be forced on a device it does not run on, and those that Triton's
    slow interpreter can do without. The longest files first."""
    from harness import available

    dropped = [item for item in items if not _can_run(item, available)]
    if interpreting():
        dropped += _met_before([item for item in items if item not in set(dropped)])
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection needs to look through it, and the benchmark asks for one a case."""
    gc.collect()
    gc.freeze()


def _met_before(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of kernels in Triton's interpreter whose values are all met in other cases of their test.

    A kernel's dtypes, indices, layouts and sizes are mostly branches on one of them. All combinations run on a GPU.
    """
    tests: dict[str, list[tuple[pytest.Item, dict[str, str]]]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("implementation") == "triton":
            values = {name: repr(value) for name, value in callspec.params.items()}
            tests.setdefault(item.nodeid.split("[")[0], []).append((item, values))
    spare: list[pytest.Item] = []
    for cases in tests.values():
        kept = meet_all_values([values for _, values in cases])
        spare += [item for place, (item, _) in enumerate(cases) if place not in kept]
    return spare


def _can_run(item: pytest.Item, available: Callable[[str, str], list[str]]) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is None or "implementation" not in callspec.params:
        return True
    op = getattr(item.module, "OP", None)  # type: ignore[attr-defined]
    device, implementation = callspec.params.get("device", "cpu"), callspec.params["implementation"]
    if implementation == "reference" and item.get_closest_marker("kernels_only"):
        return False  # the reference is exempt: PyTorch's products order their sums by the number of rows
    if implementation == "triton" and device == "cpu" and torch.bfloat16 in callspec.params.values():
        return False  # Triton's interpreter computes bf16 wrongly
    return op is None or implementation in available(op, device)
