"""AcceptanceStats against counting by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels import AcceptanceStats, ArgumentError

rounds = st.lists(st.integers(0, 6).flatmap(lambda d: st.tuples(st.integers(0, d), st.just(d))), max_size=30)


def stats_of(pairs: list[tuple[int, int]]) -> AcceptanceStats:
    stats = AcceptanceStats()
    stats.update([a for a, _ in pairs], [d for _, d in pairs])
    return stats


@settings(max_examples=100, deadline=None)
@given(rounds)
def test_counts(pairs: list[tuple[int, int]]) -> None:
    stats = stats_of(pairs)
    drafting = [(a, d) for a, d in pairs if d]
    deepest = max((d for _, d in pairs), default=0)
    assert stats.rounds == len(pairs) and stats.drafting_rounds == len(drafting)
    assert stats.tokens == sum(a + 1 for a, _ in pairs)
    assert stats.tokens_per_round == (stats.tokens / len(pairs) if pairs else 0)
    drafted, accepted = sum(d for _, d in pairs), sum(a for a, _ in pairs)
    assert stats.acceptance_rate == (accepted / drafted if drafted else 0)
    assert stats.mean_accepted_length == (accepted / len(drafting) if drafting else 0)
    assert stats.histogram == [sum(a == n for a, _ in drafting) for n in range(deepest + 1)]
    for j, share in enumerate(stats.accepted_per_position):
        tried = [a for a, d in pairs if d > j]
        assert share == sum(a > j for a in tried) / len(tried)
    assert json.loads(json.dumps(stats.as_dict()))["accepted_tokens"] == accepted


@settings(max_examples=100, deadline=None)
@given(rounds, rounds)
def test_merge_equals_all_rounds(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    merged, other = stats_of(one), stats_of(two)
    before = other.as_dict()
    merged.merge(other)
    assert merged == stats_of(one + two) and other.as_dict() == before


def test_one_depth_for_all() -> None:
    stats = AcceptanceStats()
    stats.update([1, 3], 4)
    assert stats == stats_of([(1, 4), (3, 4)])


def test_prometheus() -> None:
    assert stats_of([(1, 2), (0, 0)]).prometheus("x") == (
        "# TYPE x_rounds_total counter\nx_rounds_total 2\n# TYPE x_tokens_total counter\nx_tokens_total 3\n"
        '# TYPE x_drafted_tokens_total counter\nx_drafted_tokens_total{position="1"} 1\n'
        'x_drafted_tokens_total{position="2"} 1\n'
        '# TYPE x_accepted_tokens_total counter\nx_accepted_tokens_total{position="1"} 1\n'
        'x_accepted_tokens_total{position="2"} 0\n'
    )


@pytest.mark.parametrize(("accepted", "drafted", "message"), [
    ([1], [2, 2], "num_drafted: expected 1 counts, got 2 (num_accepted)"),
    ([0, 0], [2, -1], "num_drafted[1]: expected at least 0, got -1"),
    ([1, 3], [2, 2], "num_accepted[1]: expected 0 to 2, got 3 (num_drafted)"),
    ([-1], 2, "num_accepted[0]: expected 0 to 2, got -1 (num_drafted)"),
])
def test_errors_add_nothing(accepted: list[int], drafted: Any, message: str) -> None:
    stats = AcceptanceStats()
    with pytest.raises(ArgumentError) as error:
        stats.update(accepted, drafted)
    assert str(error.value) == f"AcceptanceStats: {message}"
    assert stats == AcceptanceStats()
