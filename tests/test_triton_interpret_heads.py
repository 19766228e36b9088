"""The heads' tests in Triton's interpreter: nearly as long as those of all other ops but draft_attention together."""

from __future__ import annotations

import pytest
from triton_interpreted import HEADS, check_interpreted


@pytest.mark.parametrize("op", HEADS)
def test_interpreted(op: str) -> None:
    check_interpreted(op)
