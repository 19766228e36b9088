"""The benchmark's timing, its plans of what to measure, and its inputs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mtp_kernels.bench import sweeps, timing
from mtp_kernels.bench.case import LEVELS
from mtp_kernels.bench.inputs import Inputs
from mtp_kernels.bench.timing import Timed, Times, measure

from mtp_kernels.ops import OPS

CPU = torch.device("cpu")


def test_times_are_medians_with_p10_and_p90() -> None:
    assert Times.of([11.0, *range(1, 11)]) == Times(6, 2, 10, 11)
    assert Times.of([4.0, 1.0]) == Times(2.5, 1, 4, 2)
    assert Times.of([7.0]) == Times(7, 7, 7, 1)


class Clock:
    """Time passes in the functions alone, and what they do is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 100.0, ""
        monkeypatch.setattr(timing, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def function(self, name: str, *seconds: float) -> Callable[[], None]:
        """Takes `seconds` in turn."""
        turns = itertools.cycle(seconds)

        def run() -> None:
            self.log += name
            self.now += next(turns)

        return run


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    one, two = Timed(clock.function("A", 1e-3, 3e-3), 1), Timed(clock.function("B", 5e-3), 1)
    first, second = measure([one, two], CPU, samples=4, seconds=100)
    assert clock.log == "AB" + "AB" * 4  # the first round warms up
    assert first.us == pytest.approx(2000) and (first.p10, first.p90) == pytest.approx((1000, 3000))
    assert second.us == second.p10 == second.p90 == pytest.approx(5000)
    assert first.samples == second.samples == 4


def test_a_sample_runs_every_set_and_counts_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timed = timing.eager([clock.function(name, 2e-3) for name in "abcd"])
    (found,) = measure([timed], CPU, samples=2, seconds=100)
    assert clock.log == "abcd" * 3 and found.us == pytest.approx(2000)


@pytest.mark.parametrize("launch", [1, 5 * timing.PAUSE])
def test_no_replay_begins_before_all_are_queued(launch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that pauses, then runs what is queued, 7 us each, while the host takes `launch` cycles to queue one."""
    pauses, queued, now = [], [], 0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.place = len(queued)

        def query(self) -> bool:
            return now >= pauses[-1]

        def elapsed_time(self, other: Event) -> float:
            return (other.place - self.place) * 7e-3

    def pause(cycles: int) -> None:
        nonlocal now
        now = 0
        queued.clear()
        pauses.append(cycles)

    def run() -> None:
        nonlocal now
        now += launch
        queued.append(now)

    monkeypatch.setattr(torch.cuda, "_sleep", pause)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = measure([Timed(run, 1, queued=True), Timed(run, 7, queued=True)], torch.device("cuda"), 3, 100)
    assert [one.us for one in found] == pytest.approx([7, 1])
    assert pauses[-1] > 2 * launch  # and what an early pause gave was thrown away
    assert pauses == ([timing.PAUSE] * 3 if launch == 1 else [timing.PAUSE * 2**i for i in (0, 1, 2, 3, 4, 4, 4)])
    assert all(one.samples == 3 for one in found)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (3.5, 4), (5.5, 6), (100.0, 8)])
def test_time_is_limited_from_three_samples_on(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    (found,) = measure([Timed(clock.function("A", 1.0), 1)], CPU, samples=8, seconds=seconds)
    assert found.samples == rounds


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("plan", [sweeps.quick, sweeps.standard])
def test_plans_have_every_op_and_level_once(plan: Any, device: str) -> None:
    cases = plan(device, "bf16")
    assert {c.name for c in cases if c.level == "op"} == set(OPS)
    assert {c.level for c in cases} == set(LEVELS)
    assert {c.name for c in cases if c.level == "round"} == {"chain", "tree"}
    assert Counter(cases).most_common(1)[0][1] == 1
    assert {c.mode for c in cases} == ({"eager"} if device == "cpu" else {"graph", "eager"})
    assert {c.dtype for c in cases if c.level != "generate"} == {"bf16"}
    attention = {c.variant for c in cases if c.name == "draft_attention"}
    assert attention == {"sliding_attention", "full_attention"}


def test_the_standard_plan_has_all_sizes() -> None:
    cases = sweeps.standard("cuda", "bf16")
    for level, name in (("step", "step"), ("op", "draft_attention")):
        found = {(c.model, c.batch, c.context) for c in cases if (c.level, c.name) == (level, name)}
        assert found == {(m, *point) for m in sweeps.REAL for point in sweeps.POINTS}
    assert {c.rows for c in cases if c.name == "draft_attention"} == {1, 4}


def test_a_product_leaves_out_ops_that_a_model_lacks() -> None:
    axes = {"model": ("tiny", "tiny-dense"), "batch": (1, 2), "rows": (1, 4)}
    cases = sweeps.product(("op", "round", "step"), ("lm_head_topk", "centroid_topk"), axes, "cpu")
    ops = {(c.name, c.model) for c in cases if c.level == "op"}
    assert ops == {("lm_head_topk", "tiny-dense"), ("centroid_topk", "tiny")}
    assert {(c.name, c.topk, c.rows) for c in cases if c.level == "round"} == {("chain", 1, 1), ("tree", 4, 4)}
    assert sum(c.level == "step" for c in cases) == 4  # rows make no difference to a chain of steps
    assert all(c.mode == "eager" for c in cases)


def test_inputs_of_a_set_are_the_same_in_every_run() -> None:
    one, two = Inputs(CPU, torch.bfloat16), Inputs(CPU, torch.bfloat16)
    assert torch.equal(one.next_set(3).normal(5), two.next_set(3).normal(5))
    assert not torch.equal(one.next_set(4).normal(5), two.next_set(5).normal(5))
    assert one.shared("x", lambda: [1]) is one.shared("x", lambda: [2])
    k, _, table, lens = one.paged_cache(3, 21, 2, 8, 16, "HND", torch.float8_e4m3fn)
    assert k.shape == (6, 16, 2, 8) and not k.is_contiguous() and k.dtype == torch.float8_e4m3fn
    assert sorted(table.flatten().tolist()) == list(range(6)) and lens.tolist() == [21] * 3
