"""The heads' tests in Triton's interpreter, in a file of their own that another process may take."""

from __future__ import annotations

from triton_interpreted import HEADS, check_interpreted


def test_interpreted() -> None:
    check_interpreted(*HEADS)
