"""The heads' tests in Triton's interpreter, in a file of their own that another process may take."""

from __future__ import annotations

import pytest
from triton_interpreted import HEADS, check_interpreted


@pytest.mark.parametrize("op", HEADS)
def test_interpreted(op: str) -> None:
    check_interpreted(op)
