"""The launch heuristics: properties of the split plan that the C++ attention uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_kernels import _native

if why := _native.why_not_built("host"):
    pytest.skip(f"mtp_kernels._host: {why}", allow_module_level=True)

from mtp_kernels._host import split_plan

LENGTHS = st.one_of(st.integers(1, 3000), st.integers(1, 2**40), st.integers(2**62, 2**63 - 1))


@given(LENGTHS)
def test_splits_cover_the_visible_keys_and_none_is_empty(visible_len: int) -> None:
    plan = split_plan(visible_len)
    assert (plan.num_splits - 1) * plan.keys_per_split < visible_len <= plan.num_splits * plan.keys_per_split


@given(LENGTHS)
def test_splits_are_neither_tiny_nor_huge(visible_len: int) -> None:
    """Nearly 64 keys at least (the least split, halved to make their number even), 512 at most."""
    plan = split_plan(visible_len)
    assert plan.keys_per_split <= 512
    assert plan.num_splits == 1 or plan.keys_per_split >= min(17, visible_len)


@given(LENGTHS, st.data())
def test_more_keys_never_mean_fewer_splits(visible_len: int, data: st.DataObject) -> None:
    shorter = data.draw(st.integers(max(1, visible_len // 8), visible_len // 2 + 1))
    assert split_plan(shorter).num_splits <= 2 * split_plan(visible_len).num_splits


@pytest.mark.parametrize(
    ("visible_len", "keys_per_split", "num_splits"),
    [(0, 0, 0), (1, 1, 1), (32, 32, 1), (33, 17, 2), (512, 128, 4), (1024, 128, 8), (8192, 512, 16)],
)
def test_known_plans(visible_len: int, keys_per_split: int, num_splits: int) -> None:
    plan = split_plan(visible_len)
    assert (plan.keys_per_split, plan.num_splits) == (keys_per_split, num_splits)
    assert repr(plan) == f"SplitPlan(keys_per_split={keys_per_split}, num_splits={num_splits})"


def test_a_plan_is_frozen() -> None:
    with pytest.raises(AttributeError):
        split_plan(1).num_splits = 2  # type: ignore[misc]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^split_plan: visible_len: expected at least 0, got -1$"):
        split_plan(-1)
