"""CUDA's kernel of a centroid head behind its scores without a GPU: its source, compiled for this CPU, against fp64."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
from candidates_cases import KINDS, SIZE, check_parts, head_problem
from emulated import compiled

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="coroutines are glibc's")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("candidates", tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize(
    ("kind", "rows", "ordered", "index"),
    [
        (kind, *more)
        for kind, more in zip(KINDS, [
            (1, False, torch.int32), (9, True, torch.int64), (2, False, torch.int64), (33, True, torch.int32),
            (3, False, torch.int32), (9, True, torch.int32),
        ], strict=True)
    ],
    ids=str,
)
def test_against_fp64(kind: str, rows: int, ordered: bool, index: torch.dtype, run: ctypes.CDLL) -> None:
    """Blocks of one part of a row, and of 32, which are four turns."""
    given, out = head_problem(kind, rows, index, "cpu")
    tensors = [given[name] for name in ("scores", "normed", "token_ordering", "lm_head")] + list(out.values())
    numbers = [index == torch.int64, ordered, given["lm_head"].stride(0), given["lm_head"].size(0), SIZE, rows]
    run.emulate_candidates(
        (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors)),
        (ctypes.c_int64 * len(numbers))(*(int(n) for n in numbers)),
    )
    check_parts(kind, given, out, ordered)
