"""Every example in a docstring runs, on a CPU, as it stands."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import mtp_kernels
from mtp_kernels.ops import OPS

# Compiled, or there only with an optional package, or a command.
SKIPPED = ("mtp_kernels._host", "mtp_kernels.triton_ops.", "mtp_kernels.bench.")


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(mtp_kernels.__path__, "mtp_kernels.", onerror=lambda name: None)]
    return ["mtp_kernels", *(name for name in found if not name.startswith(SKIPPED))]


@pytest.mark.parametrize("name", modules())
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_has_an_example(op: str) -> None:
    function = getattr(mtp_kernels.ops, op)
    assert doctest.DocTestFinder(recurse=False).find(function)[0].examples
