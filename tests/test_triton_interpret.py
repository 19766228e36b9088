"""The tests of every op that has a Triton kernel, and of a round of them, run in Triton's interpreter on the CPU.

draft_attention's and the heads' have files of their own, so that these run side by side.
"""

from __future__ import annotations

import pytest
from triton_interpreted import HEADS, check_interpreted

from mtp_kernels.ops import OPS

ALONE = ("draft_attention", *HEADS)
WITH_KERNEL = [name for name, op in OPS.items() if any(k.implementation == "triton" for k in op.kernels)]


@pytest.mark.parametrize("op", [name for name in WITH_KERNEL if name not in ALONE])
def test_interpreted(op: str) -> None:
    check_interpreted(op)


def test_round() -> None:
    check_interpreted("fused")


def test_the_others_have_kernels() -> None:
    assert set(ALONE) <= set(WITH_KERNEL)
