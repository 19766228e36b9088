"""DraftPolicy's choices where the right one is known, its state, its errors; how well it does is test_simulate's."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels import ArgumentError, CostModel, DraftPolicy

FLAT = CostModel(draft_step=[(1, 1e-3)], verify=[(1, 20e-3)])  # a token more costs nothing to verify
LINEAR = CostModel(draft_step=[(1, 10e-3)], verify=[(1, 1e-3), (1000, 1.0)])  # each costs as much as the first


def play(policy: DraftPolicy, costs: CostModel, batch: int, rounds: int, accept: Any, opted_out: int = 0) -> list[int]:
    """Rounds in which accept(depth) tokens of each request are accepted; the chosen depths."""
    ids, chosen = list(range(batch)), []
    for _ in range(rounds):
        depth = policy.choose(batch, ids)
        chosen.append(depth)
        drafted = [0] * opted_out + [depth] * (batch - opted_out)
        accepted = [min(accept(depth), d) for d in drafted]
        policy.update(ids, drafted, accepted, costs.draft_seconds(batch, depth),
                      costs.verify_seconds(batch + sum(drafted)))
    return chosen


@pytest.mark.parametrize("given_costs", [True, False])
def test_what_is_free_is_used(given_costs: bool) -> None:
    chosen = play(DraftPolicy(6, costs=FLAT if given_costs else None), FLAT, 4, 300, lambda depth: depth)
    assert sum(chosen[-100:]) > 0.95 * 600


@pytest.mark.parametrize("given_costs", [True, False])
@pytest.mark.parametrize("batch", [1, 100])
def test_what_never_is_accepted_is_not_drafted(given_costs: bool, batch: int) -> None:
    policy = DraftPolicy(6, costs=FLAT if given_costs else None)
    chosen = play(policy, FLAT, batch, 400, lambda depth: 0)
    lost = sum(chosen[50:]) * 1e-3  # seconds of drafting, all for nothing
    assert lost <= (0.005 * 350 + 3) * 21e-3 and sum(d > 0 for d in chosen[200:]) < 50  # probes alone


def test_a_busy_batch_is_left_alone() -> None:
    chosen = play(DraftPolicy(6), LINEAR, 64, 400, lambda depth: min(depth, 1))
    assert sum(d > 0 for d in chosen[100:]) < 40 and sum(d > 0 for d in chosen[-100:]) < 15  # probes alone


def test_probes_find_out_that_things_have_changed() -> None:
    policy = DraftPolicy(6, costs=FLAT)
    play(policy, FLAT, 8, 300, lambda depth: 0)
    chosen = play(policy, FLAT, 8, 500, lambda depth: depth)
    assert sum(chosen[-100:]) > 0.95 * 600
    chosen = play(policy, FLAT, 8, 200, lambda depth: 0)
    assert sum(chosen[-100:]) < 40


def test_a_wrong_model_is_put_right() -> None:
    """Told that a draft costs a hundred times what it does, and the other way round."""
    dear = CostModel(draft_step=[(1, 0.1)], verify=[(1, 20e-3)])
    assert sum(play(DraftPolicy(4, costs=dear), FLAT, 2, 2000, lambda depth: depth)[-200:]) > 0.9 * 800
    assert sum(play(DraftPolicy(4, costs=FLAT), dear, 2, 500, lambda depth: depth)[-200:]) < 20


def test_rounds_that_took_exceptionally_long_are_forgiven() -> None:
    policy = DraftPolicy(4, costs=FLAT)
    for depth in (0, 1, 2, 3, 4):  # kernels are compiled
        policy.update([1], [depth], [depth], 5.0 if depth else 0.0, 60.0)
    assert sum(play(policy, FLAT, 1, 600, lambda depth: depth)[-100:]) > 0.9 * 400


def test_no_probes_without_exploring() -> None:
    policy = DraftPolicy(6, costs=FLAT, explore=0)
    assert set(play(policy, FLAT, 8, 200, lambda depth: 0)[50:]) == {0}


def test_requests_are_told_apart() -> None:
    """A batch of the good request alone is drafted deeper than one of the bad, after rounds with both."""
    policy = DraftPolicy(8, costs=CostModel(draft_step=[(1, 2e-3)], verify=[(1, 10e-3)]), explore=0)
    for _ in range(60):
        policy.update(["good", "bad"], [8, 8], [8, 0], 16e-3, 10e-3)
    good, new, bad = (policy.rates(1, [name]) for name in ("good", "new", "bad"))
    assert all(g > n > b for g, n, b in zip(good[1:], new[1:], bad[1:]))
    assert good.index(max(good)) > bad.index(max(bad))
    assert policy.rates(2, ["x", "y"]) == policy.rates(2, ["u", "v"])  # new ones are all alike
    policy.forget("good")
    assert policy.rates(1, ["good"]) == policy.rates(1, ["new"])


def test_opting_out() -> None:
    policy = DraftPolicy(4, costs=FLAT)
    play(policy, FLAT, 2, 50, lambda depth: depth)
    deep = policy.rates(2, [0, 1])
    policy.opt_out(0)
    half = policy.rates(2, [0, 1])
    assert all(a > b > c for a, b, c in zip(deep[1:], half[1:], policy.rates(2, [0, 5])[:1] * 4))
    policy.opt_out(1)
    assert [policy.choose(2, [0, 1]) for _ in range(50)] == [0] * 50
    policy.forget(1)
    assert policy.choose(2, [0, 1]) > 0
    before = policy.acceptance.to_dict()
    policy.update([0], [0], [0], 0.0, 20e-3)
    assert policy.acceptance.to_dict() == before  # nothing drafted, nothing learnt


def test_an_empty_batch() -> None:
    policy = DraftPolicy(4)
    assert policy.choose(0) == 0 and policy.choose(0, []) == 0
    policy.update([], [], [], 0.0, 0.0)
    assert policy.rounds == 0


def test_seconds_of_nothing_are_not_learnt() -> None:
    policy = DraftPolicy(4, costs=FLAT)
    before = policy.costs.to_dict()
    policy.update([1], [2], [1], 0.0, 0.0)
    assert policy.costs.to_dict() == before and policy.rounds == 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=40), st.booleans())
def test_a_saved_policy_goes_on_the_same(history: list[tuple[int, int]], model: bool) -> None:
    """Through JSON, in the middle of any history; and the same calls give the same choices."""
    policies = [DraftPolicy(4, costs=FLAT if model else None) for _ in range(2)]
    policies[0].opt_out("r0")
    policies[1].opt_out("r0")
    for step, (batch, accepted) in enumerate(history):
        ids = [f"r{i + step // 7}" for i in range(batch)]
        depths = {policy.choose(batch, ids) for policy in policies}
        assert len(depths) == 1
        depth = depths.pop()
        for policy in policies:
            policy.update(ids, [depth] * batch, [min(accepted, depth)] * batch, 1e-3 * depth, 20e-3 + 1e-4 * accepted)
            policy.forget(f"r{step}")
        policies[1] = DraftPolicy.from_dict(json.loads(json.dumps(policies[1].to_dict())))
        assert policies[0].to_dict() == policies[1].to_dict()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=30))
def test_any_history_gives_a_choice(history: list[tuple[int, int, float, float]]) -> None:
    policy = DraftPolicy(3)
    for batch, accepted, draft, verify in history:
        depth = policy.choose(batch, list(range(batch)))
        assert 0 <= depth <= 3
        policy.update(list(range(batch)), [depth] * batch, [min(accepted, depth)] * batch, draft, verify)
        assert all(math.isfinite(rate) and rate > 0 for rate in policy.rates(batch))


def error(message: str, function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == message


def test_errors() -> None:
    policy = DraftPolicy(4)
    before = policy.to_dict()
    error("DraftPolicy: max_steps: expected at least 1, got 0", DraftPolicy, 0)
    error("DraftPolicy: prior_acceptance: expected a number between 0 and 1, got 1", DraftPolicy, prior_acceptance=1)
    error("DraftPolicy: margin: expected a finite number >= 0, got -0.1", DraftPolicy, margin=-0.1)
    error("DraftPolicy: explore: expected a number from 0 to below 1, got 1", DraftPolicy, explore=1)
    error("DraftPolicy: costs: expected a CostModel, got dict", DraftPolicy, costs={})
    error("DraftPolicy: batch: expected at least 0, got -1", policy.choose, -1)
    error("DraftPolicy: request_ids: expected at most 2 ids, got 3 (batch)", policy.choose, 2, [5, 6, 7])
    error("DraftPolicy: num_drafted: expected 2 counts, got 1 (request_ids)", policy.update, [1, 2], [1], [0, 0], 0, 0)
    error("DraftPolicy: num_accepted: expected 1 counts, got 0 (request_ids)", policy.update, [1], [1], [], 0, 0)
    error("DraftPolicy: num_drafted[1]: expected 0 to 4, got 5 (max_steps)", policy.update, [1, 2], [1, 5], [0, 0], 0,
          0)
    error("DraftPolicy: num_accepted[0]: expected 0 to 1, got 2 (num_drafted)", policy.update, [1], [1], [2], 0, 0)
    error("DraftPolicy: draft_seconds: expected a finite number of seconds >= 0, got nan", policy.update, [1], [1], [1],
          math.nan, 1.0)
    error("DraftPolicy: verify_seconds: expected a finite number of seconds >= 0, got -1.0", policy.update, [1], [1],
          [1], 1.0, -1.0)
    error("DraftPolicy.from_dict: state: expected a dict of version 1, got None", DraftPolicy.from_dict, {})
    error("DraftPolicy.from_dict: state: expected what to_dict gives, got KeyError('costs')", DraftPolicy.from_dict,
          {"version": 1, "max_steps": 4})
    assert policy.to_dict() == before


def test_cost_model() -> None:
    model = CostModel(draft_step=[(2, 1.0), (4, 3.0)], verify=[(1, 1.0)])
    assert [model.draft_seconds(b, 1) for b in (1, 2, 3, 4, 6)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert model.draft_seconds(4, 3) == 9.0 and model.verify_seconds(50) == 1.0
    falling = CostModel(draft_step=[(1, 1.0)], verify=[(1, 2.0), (2, 1.0)])
    assert falling.verify_seconds(100) > 0
    error("CostModel: verify: expected at least one point, got none", CostModel, [(1, 1.0)], [])
    error("CostModel: draft_step: expected ascending points, got 2 before 1", CostModel, [(2, 1.0), (1, 1.0)],
          [(1, 1.0)])
    error("CostModel: verify: expected positive finite numbers, got (1.0, 0.0)", CostModel, [(1, 1.0)], [(1, 0)])
