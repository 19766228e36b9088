"""draft_attention's tests in Triton's interpreter: longer than those of any other op."""

from __future__ import annotations

from triton_interpreted import check_interpreted


def test_interpreted() -> None:
    check_interpreted("draft_attention")
