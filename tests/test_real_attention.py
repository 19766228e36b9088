"""The problems of tests/gpu/test_real_sizes.py at tiny sizes: right results pass, and each kind of wrong one fails."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import real_attention
import torch
from harness import DEVICES, implementations
from pairwise import meet_all_values, pairwise
from real_attention import SLIDING, AttentionCase, check_attention, problem

OP = "draft_attention"
CASES = [
    AttentionCase("tiny", SLIDING, 513, 8, 16, "HND", False, 4, torch.float16, "exact"),
    AttentionCase("tiny", SLIDING, 8, 3, 3, "NHD", True, 1, torch.bfloat16, "flat"),
    AttentionCase("tiny", "full_attention", 1024, 3, 61, "NHD", False, 1, torch.float32, "wide"),
    AttentionCase("tiny", "full_attention", 511, 1, 64, "HND", True, 4, torch.float16, "flat"),
]

Change = Callable[[list[Any], dict[str, Any]], None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_results_pass(device: str, implementation: str, case: AttentionCase) -> None:
    check_attention(case, device, implementation)


def misses_the_last_key(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[4] = (args[4] - 1).clamp(min=0)


def misses_the_first_key(args: list[Any], kwargs: dict[str, Any]) -> None:
    kwargs["window_left"] = kwargs["window_left"] - 1 if kwargs["window_left"] >= 0 else int(args[4].max()) - 2


def sees_a_key_too_many(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[4] = args[4] + 1
    kwargs["max_seq_len"] = -1


def ignores_the_scale(args: list[Any], kwargs: dict[str, Any]) -> None:
    kwargs["k_scale"] = torch.ones_like(kwargs["k_scale"])


def turns_nothing(args: list[Any], kwargs: dict[str, Any]) -> None:
    del kwargs["positions"], kwargs["rope_inv_freq"]


CHANGES = [misses_the_last_key, misses_the_first_key, sees_a_key_too_many, ignores_the_scale, turns_nothing]


@pytest.mark.parametrize(
    ("change", "case"), [(one, case) for one in CHANGES for case in CASES if case.fp8 or one is not ignores_the_scale]
)
def test_wrong_results_fail(monkeypatch: pytest.MonkeyPatch, change: Change, case: AttentionCase) -> None:
    real = real_attention.call

    def wrong(op: str, *args: Any, **kwargs: Any) -> Any:
        changed = list(args)
        change(changed, kwargs)
        return real(op, *changed, **kwargs)

    monkeypatch.setattr(real_attention, "call", wrong)
    with pytest.raises(AssertionError):
        check_attention(case, "cpu", "reference")


def test_requests_share_pages_where_a_batch_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase("tiny", "full_attention", 512, batch=5)
    assert len(problem(case, "cpu").keys) == 5
    monkeypatch.setattr(real_attention, "MOST_BYTES", 2 * 512 * 2 * 128 * 2)  # K and V of two requests
    one = problem(case, "cpu")
    assert [keys.requests for keys in one.keys] == [[0, 2, 4], [1, 3]]
    assert one.args[1].nbytes < 2 * 512 * 128 * 2 + 3 * 16 * 128 * 2


def test_pairwise_meets_every_pair() -> None:
    axes: dict[str, list[Any]] = {"a": [0, 1, 2, 3], "b": ["x", "y", "z"], "c": [True, False], "d": [1.5, 2.5]}
    cases = pairwise(axes)
    for one, two in combinations(axes, 2):
        assert {(c[one], c[two]) for c in cases} == {(x, y) for x in axes[one] for y in axes[two]}
    assert len(cases) < 20 and cases == pairwise(axes)


def test_meet_all_values_leaves_none_out() -> None:
    """Of cases that lack some combinations; of one axis, all stay."""
    cases = [{"a": a, "b": b, "c": c, "d": 0} for a in range(4) for b in "xyz" for c in (True, False) if a or b != "x"]
    chosen = [cases[i] for i in meet_all_values(cases)]
    for axis in "abcd":
        assert {c[axis] for c in chosen} == {c[axis] for c in cases}
    assert 4 <= len(chosen) < 7 < len(cases)
    alone = [{"a": value} for value in range(5)]
    assert meet_all_values([*alone, {"a": 3}]) == list(range(5))
