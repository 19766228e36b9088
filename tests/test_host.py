"""The launch heuristics: properties of the split plan, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_kernels import _native

if why := _native.why_not_built("host"):
    pytest.skip(f"mtp_kernels._host: {why}", allow_module_level=True)

from mtp_kernels._host import SplitPlan, SplitProblem, max_splits, split_plan, workspace_bytes

E4B_FULL = {
    "visible_len": 8192, "page_size": 64, "rows": 1, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 512,
    "element_size": 2, "num_sms": 132,
}
SIZES = {
    "page_size": st.one_of(st.sampled_from([1, 2, 16, 64, 256]), st.integers(1, 600)),
    "rows": st.integers(1, 64),
    "num_kv_heads": st.integers(1, 16),
    "head_dim": st.sampled_from([64, 128, 256, 512]),
    "element_size": st.sampled_from([1, 2, 4]),
    "num_sms": st.integers(1, 200),
}


@st.composite
def problems(draw: Any, smallest: int = 0) -> dict[str, int]:
    sizes = {name: draw(values) for name, values in SIZES.items()}
    length = draw(st.one_of(st.integers(smallest, 3000), st.integers(smallest, 2**40)))
    first = draw(st.one_of(st.just(0), st.integers(0, 5000), st.integers(0, 2**40)))
    return {**sizes, "num_qo_heads": sizes["num_kv_heads"] * draw(st.integers(1, 16)), "visible_len": length,
            "first_key": first}


def plan_of(sizes: dict[str, int], **changed: int) -> SplitPlan:
    return split_plan(SplitProblem(**{**sizes, **changed}))


@given(problems())
def test_splits_cover_the_visible_keys_and_none_is_empty(sizes: dict[str, int]) -> None:
    plan = plan_of(sizes)
    first, last = sizes["first_key"], sizes["first_key"] + sizes["visible_len"]  # visible: first <= key < last
    if sizes["visible_len"] == 0:
        assert plan.num_splits == 0
        return
    assert plan.start <= first < plan.start + plan.keys_per_split  # the first split holds the first key
    assert plan.start + (plan.num_splits - 1) * plan.keys_per_split < last  # the last one is not empty
    assert plan.start + plan.num_splits * plan.keys_per_split >= last  # and holds the last key


@given(problems())
def test_splits_are_whole_pages_and_whole_tiles(sizes: dict[str, int]) -> None:
    plan, page = plan_of(sizes), sizes["page_size"]
    assert plan.start % page == 0 and sizes["first_key"] - plan.start < page
    assert plan.keys_per_split % page == 0
    if page % plan.tile_keys == 0 or plan.tile_keys % page == 0:
        assert plan.keys_per_split % plan.tile_keys == 0
    assert plan.keys_per_split >= plan.tile_keys


@given(problems(smallest=1))
def test_the_number_of_splits_is_bounded(sizes: dict[str, int]) -> None:
    plan = plan_of(sizes)
    assert 1 <= plan.num_splits <= max_splits(SplitProblem(**sizes)) <= 128
    assert plan.num_splits <= max(1, sizes["num_sms"] // sizes["num_kv_heads"])


@given(problems(smallest=1), st.data())
def test_monotone_in_the_length(sizes: dict[str, int], data: Any) -> None:
    """More keys: splits never get shorter; and a bound for a length holds for every shorter one, wherever it begins."""
    shorter = data.draw(st.integers(1, sizes["visible_len"]))
    elsewhere = data.draw(st.integers(0, 2**40))
    assert plan_of(sizes, visible_len=shorter).keys_per_split <= plan_of(sizes).keys_per_split
    assert plan_of(sizes, visible_len=shorter, first_key=elsewhere).num_splits <= max_splits(SplitProblem(**sizes))


@given(problems(), st.integers(0, 4096))
def test_the_workspace_holds_every_split_and_grows_by_the_request(sizes: dict[str, int], batch: int) -> None:
    problem = SplitProblem(**sizes)
    one = workspace_bytes(problem, 1)
    splits = split_plan(problem).num_splits
    partial = 4 * sizes["rows"] * sizes["num_qo_heads"] * (sizes["head_dim"] + 1)
    assert one >= (splits * partial if splits > 1 else 0)
    assert workspace_bytes(problem, batch) == batch * one


def test_a_known_plan() -> None:
    """E4B's full layer at 8192 keys on a GPU of 132 multiprocessors: 32 splits of 256 keys, tiles of 32 keys."""
    plan = plan_of(E4B_FULL)
    assert (plan.start, plan.tile_keys, plan.keys_per_split, plan.num_splits) == (0, 32, 256, 32)
    assert workspace_bytes(SplitProblem(**E4B_FULL), 1) == 33 * 4 * 513 * 4  # 33: the window may begin inside a page


def test_a_short_request_is_not_split() -> None:
    assert plan_of(E4B_FULL, visible_len=1).num_splits == 1
    assert workspace_bytes(SplitProblem(**{**E4B_FULL, "visible_len": 1}), 64) == 0


def test_results_are_values() -> None:
    problem, plan = SplitProblem(**E4B_FULL), plan_of(E4B_FULL)
    assert repr(plan) == "SplitPlan(start=0, tile_keys=32, keys_per_split=256, num_splits=32)"
    assert eval(repr(problem)) == problem
    assert plan == plan_of(E4B_FULL) and hash(plan) == hash(plan_of(E4B_FULL))
    assert plan != plan_of(E4B_FULL, visible_len=1) and plan != repr(plan)
    for frozen, name in ((problem, "rows"), (plan, "num_splits")):
        with pytest.raises(AttributeError):
            setattr(frozen, name, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"visible_len": -1}, "split_plan: visible_len: expected 0 to 2^40, got -1"),
        ({"first_key": 2**41}, "split_plan: first_key: expected 0 to 2^40, got 2199023255552"),
        ({"page_size": 0}, "split_plan: page_size: expected 1 to 2^20, got 0"),
        ({"num_sms": 0}, "split_plan: num_sms: expected 1 to 2^20, got 0"),
        ({"num_kv_heads": 3}, "split_plan: num_qo_heads: expected a multiple of num_kv_heads, got 4"),
    ],
)
def test_errors(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_of(E4B_FULL, **changed)
    assert str(error.value) == message
