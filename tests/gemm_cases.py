"""What the tests of the ops with a GEMM share."""

from __future__ import annotations

from typing import Any

import torch
from harness import assert_same_bits, call, forced, results

GROUPS = [(0, 1), (3, 19), (5, 22), (20, 84), (149, 150), (60, 150)]  # few and many of the rows, each a batch


def check_rows_alone(op: str, implementation: str, args: tuple[Any, ...], batched: tuple[int, ...]) -> None:
    """150 rows give each row the bits of a smaller batch; `batched` are the arguments that hold the rows."""
    with forced(implementation):
        together = results(call(op, *args))
        for first, last in GROUPS:
            some = tuple(a[first:last] if i in batched else a for i, a in enumerate(args))
            for one, whole in zip(results(call(op, *some)), together):
                assert_same_bits(one, whole[first:last])


def check_threads(op: str, implementation: str, args: tuple[Any, ...]) -> None:
    """One, two and three threads give the same bits."""
    before = torch.get_num_threads()
    try:
        with forced(implementation):
            torch.set_num_threads(1)
            alone = results(call(op, *args))
            for threads in (2, 3):
                torch.set_num_threads(threads)
                for one, other in zip(results(call(op, *args)), alone):
                    assert_same_bits(one, other)
    finally:
        torch.set_num_threads(before)
