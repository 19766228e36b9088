"""The simulator against its record, and DraftPolicy in it: beside every fixed depth, at every batch size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mtp_kernels.bench.policy_command import Row, compare
from mtp_kernels.bench.record import Record
from mtp_kernels.bench.simulate import (
    COSTS,
    DRAFT_STEP,
    MAX_STEPS,
    World,
    independent,
    recorded,
    regimes,
    run_fixed,
    run_policy,
)
from pairwise import pairwise

from mtp_kernels import DraftPolicy
from mtp_kernels.cli import main

ROOT = Path(__file__).parents[1]
# Tokens of a request. Where acceptance falls, the best depth is only a little better than those beside it: it takes
# longer to find.
KINDS = {"falling": 2000, "poor": 1000, "differing": 1000, "changing": 1000}


def check_promise(rows: list[Row]) -> None:
    worst = min(rows, key=lambda row: row.of_best)
    assert worst.of_best >= 0.97, worst
    slowest = min(rows, key=lambda row: row.of_none)
    assert slowest.of_none >= 0.97, slowest


@pytest.mark.parametrize("first", range(1, len(COSTS) + 1))
def test_every_batch_size(first: int) -> None:
    """On the recorded acceptance: at least 97% of the best fixed depth, and of no drafting. The cost models take turns;
    above 32 every third batch of each. `mtp-kernels bench policy --acceptance pair --batches 1,2,3,...` runs all."""
    for batch in (*range(first, 33, len(COSTS)), *range(32 + first, 129, 3 * len(COSTS))):
        label = list(COSTS)[(batch // len(COSTS)) % len(COSTS)]
        check_promise(list(compare({label: COSTS[label]}, {"pair": [recorded()]}, [batch], 1000, seed=2)))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_acceptance(name: str) -> None:
    """Every kind, cost model and batch size in pairs; test_the_committed_result has all of them together."""
    axes = {"costs": COSTS, "name": KINDS, "batch": (1, 6, 24)}
    for label, batch in ((case["costs"], case["batch"]) for case in pairwise(axes) if case["name"] == name):
        check_promise(list(compare({label: COSTS[label]}, {name: regimes()[name]}, [batch], KINDS[name], seed=3)))


def test_the_record_gives_the_figures_of_decoding() -> None:
    """Tokens a round at depth 4, replayed, are those that examples/evaluate_pair.py measured by decoding."""
    measured = json.loads((ROOT / "examples" / "pair" / "acceptance.json").read_text(encoding="utf-8"))["results"]
    for head in ("centroid", "dense"):
        (decoded,) = [r for r in measured if (r["head"], r["shape"]) == (head, "chain")]
        rounds = made = 0
        for stream in recorded(head):
            place = 0
            while place < len(stream) - 2:  # the first token came from the prefill; for a last one nothing is drafted
                step = min(int(stream[place]), decoded["steps"]) + 1
                made += min(step, len(stream) - 1 - place)
                place += step
                rounds += 1
        assert (rounds, made) == (decoded["rounds"], decoded["tokens"])


def test_draft_steps_are_those_of_the_sweep() -> None:
    results = Record.load(ROOT / "bench" / "results" / "h200" / "sweep.jsonl").results
    steps = {(r.case.model, r.case.batch, r.case.context): r.us for r in results
             if r.case.level == "step" and r.candidate == "mtp"}
    for model, points in DRAFT_STEP.items():
        for (batch, seconds), context in zip(points, (1024, 8192, 4096)):
            assert abs(seconds * 1e6 - steps[model, batch, context]) < 0.06


def test_the_committed_result() -> None:
    record = json.loads((ROOT / "bench" / "results" / "policy" / "simulation.json").read_text(encoding="utf-8"))
    rows = [Row(**row) for row in record["rows"]]
    assert {(row.costs, row.acceptance, row.batch) for row in rows} == {
        (costs, name, 2**i) for costs in COSTS for name in regimes() for i in range(8)
    }
    check_promise(rows)


def test_a_fixed_depth_is_replayed() -> None:
    """One request of known acceptance: rounds and tokens counted by hand; a round ends where the chain failed."""
    streams = [np.array([3, 0, 8, 8, 1, 0, 2, 0])]
    world = World([streams], batch=1, tokens=50, seed=0)
    world._place[:] = 0
    assert world.round(2).tolist() == [2] and world.ids == [1]  # at 0, to 3
    assert world.round(2).tolist() == [2]  # at 3, to 6
    assert world.round(8).tolist() == [2] and world.ended == [1] and world.ids == [2]  # at 6, over the end
    assert world.made == 9 and world._place.tolist() == [0]


def test_the_same_work_for_all() -> None:
    """Without a draft a round makes a token a request; deeper ones need fewer rounds for at least as many tokens."""
    assert run_fixed([recorded()], 4, 400, 0) == (400, 100)
    rounds = [run_fixed([recorded()], 4, 4000, depth)[1] for depth in range(MAX_STEPS + 1)]
    assert rounds == sorted(rounds, reverse=True)


def test_phases_change_by_tokens() -> None:
    nothing, everything = independent([0.0] * 8, 5, 50, 1), independent([1.0] * 8, 5, 50, 1)
    made, rounds = run_fixed([nothing, everything], 10, 2000, 8)
    assert made >= 2000 and rounds == 100 + 12  # 1000 tokens one by one, then ninety a round


def test_independent_acceptance() -> None:
    streams = np.stack(independent([0.9, 0.5, 0.2], 200, 100, seed=1))
    for depth, share in ((1, 0.9), (2, 0.45), (3, 0.09)):
        assert abs((streams >= depth).mean() - share) < 0.01


def test_a_run_repeats() -> None:
    runs = [run_policy(DraftPolicy(8), [recorded()], COSTS["E4B"], 6, 1800, seed=4) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].rounds != run_policy(DraftPolicy(8), [recorded()], COSTS["E4B"], 6, 1800, seed=5).rounds


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "record.json"
    options = ["--batches", "8", "--tokens", "500", "--acceptance", "pair,poor"]
    assert main(["bench", "policy", *options, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "policy / none" in shown and "compute-bound" in shown and "poor" in shown
    record = json.loads(out.read_text(encoding="utf-8"))
    assert len(record["rows"]) == len(COSTS) * 2
    assert record["command"].startswith("mtp-kernels bench policy --batches 8 --tokens 500")
    short = ["bench", "policy", "--batches", "1", "--tokens", "1", "--acceptance", "poor", "--json"]
    assert main([*short, "--out", str(tmp_path)]) == 2
    assert "mtp-kernels bench: " in capsys.readouterr().err
