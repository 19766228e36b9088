"""The benchmark of whole generations: the target's own tokens, or no time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from bench_cases import BANDWIDTH, GENERATE, SETTING, one_kernel, ours  # noqa: F401 - a fixture
from mtp_kernels.bench import run_generate
from mtp_kernels.bench.runner import run_case

pytestmark = pytest.mark.usefixtures("one_thread")  # these sizes gain nothing from a second one


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(run_generate, "NEW_TOKENS", 8)
    monkeypatch.setattr(run_generate, "PROMPT_TOKENS", 40)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("topk", [1, 4])
def test_generation_is_the_targets_own(topk: int) -> None:
    found = {r.candidate: r for r in run_case(replace(GENERATE, topk=topk), SETTING, BANDWIDTH)}
    assert set(found) == ({"mtp", "target alone"} if topk == 1 else {"mtp"})
    assert all(r.status == "ok" and r.us is not None and r.floor_us is None for r in found.values())
    assert 1 <= found["mtp"].extra["tokens_per_round"] <= 5
    assert set(found["mtp"].implementation.split("+")) <= {"reference", "cpu"} and found["mtp"].implementation


@pytest.mark.usefixtures("short")
def test_other_tokens_than_the_targets_get_no_time(serve: Callable[..., None]) -> None:
    serve("commit", lambda found: ((found[0] + 1) % 64, *found[1:]))
    result = ours(GENERATE)
    assert result.status == "wrong" and "differs from the target's own greedy decoding" in result.why
    assert result.us is None


def test_without_transformers_generation_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (result,) = run_case(GENERATE, SETTING, BANDWIDTH)
    assert (result.candidate, result.status) == ("mtp", "unsupported") and "pip install transformers" in result.why
