"""The tests of every op that has a Triton kernel, and of a round of them, run in Triton's interpreter on the CPU.

draft_attention's and the heads' have files of their own, so that these run side by side.
"""

from __future__ import annotations

import pytest
from triton_interpreted import HEADS, check_interpreted

from mtp_kernels.ops import OPS

ELSEWHERE = ("draft_attention", *HEADS)
WITH_KERNEL = [name for name, op in OPS.items() if any(k.implementation == "triton" for k in op.kernels)]
HERE = [*(name for name in WITH_KERNEL if name not in ELSEWHERE), "fused"]  # the last is the round
PROCESSES = 3  # each imports everything anew


@pytest.mark.parametrize("names", [HERE[i::PROCESSES] for i in range(PROCESSES)], ids=lambda names: "+".join(names))
def test_interpreted(names: list[str]) -> None:
    check_interpreted(*names)


def test_the_others_have_kernels() -> None:
    assert set(ELSEWHERE) <= set(WITH_KERNEL)
