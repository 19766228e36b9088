"""A wrong kernel gets no time, ours or a peer's, in an op, a step or a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_cases import (  # noqa: F401 - a fixture
    BANDWIDTH,
    CPU,
    SETTING,
    OnePeer,
    one_kernel,
    op_case,
    ours,
    step_case,
)
from harness import results
from mtp_kernels.bench import run_steps
from mtp_kernels.bench.case import Result
from mtp_kernels.bench.ops import bench_of
from mtp_kernels.bench.run_ops import OpProblem
from mtp_kernels.bench.runner import run_case
from torch import Tensor

from mtp_kernels import _native, captured
from mtp_kernels.ops import OPS
from mtp_kernels.ops._registry import Kernel

pytestmark = pytest.mark.usefixtures("one_thread")  # these sizes gain nothing from a second one


def off_by(size: Callable[[], float]) -> Callable[[Any], Any]:
    """Adds to one element of the first result."""

    def change(found: Any) -> Any:
        first, *others = results(found)
        first = first.clone()
        first.view(-1)[-1] += size()
        return (first, *others) if others else first

    return change


FLOAT_OPS = [op for op in OPS if bench_of(op).CHECK == "floats"]


@pytest.mark.parametrize("op", [*FLOAT_OPS, "centroid_logits", "centroid_topk", "lm_head_topk"])
def test_a_slightly_wrong_kernel_gets_no_time(op: str, serve: Callable[..., None]) -> None:
    case = op_case(op, batch=2, rows=2)
    serve(op, lambda found: found)
    right = ours(case)
    assert right.status == "ok" and right.implementation == "triton" and right.us is not None
    serve(op, off_by(lambda: 3 * (right.allowed or 0.0)))
    wrong = ours(case)
    assert (wrong.status, wrong.why) == ("wrong", "deviates too far from fp64")
    assert wrong.us is wrong.p10 is wrong.p90 is None and wrong.samples == 0
    assert wrong.error is not None and right.allowed is not None and wrong.error > 2 * right.allowed


@pytest.mark.parametrize("op", [op for op in OPS if bench_of(op).CHECK == "exact"])
@pytest.mark.parametrize("place", [0, -1])
def test_one_other_entry_makes_an_exact_op_wrong(op: str, place: int, serve: Callable[..., None]) -> None:
    def change(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = [r.clone() for r in found]
        entry = changed[place].view(-1)
        entry[-1] = ~entry[-1] if entry.dtype == torch.bool else entry[-1] + 1
        return tuple(changed)

    case = op_case(op, batch=2, rows=2)
    serve(op, lambda found: found)
    assert ours(case).us is not None
    serve(op, change)
    result = ours(case)
    assert result.status == "wrong" and result.us is None and result.why


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r.new_empty((*r.shape, 1)), "has shape"),
        (lambda r: r[..., :-1], "has shape"),
        (lambda r: torch.cat([r, r[:1]]), "has shape"),
    ],
)
def test_a_wrong_shape_gets_no_time(op: str, change: Any, why: str, serve: Callable[..., None]) -> None:
    serve(op, lambda found: change(found) if isinstance(found, Tensor) else (change(found[0]), *found[1:]))
    result = ours(op_case(op, batch=2, rows=2))
    assert result.status == "wrong" and why in result.why and result.us is result.error is None


def test_a_missing_result_gets_no_time(serve: Callable[..., None]) -> None:
    serve("post_project", lambda found: found[0])
    result = ours(op_case("post_project"))
    assert (result.status, result.us) == ("error", None)  # torch refuses it
    reference = OPS["tree_expand"].reference
    setting = replace(SETTING, peers=OnePeer((), function=lambda *a, **k: reference(*a, **k)[:5]))
    found = run_case(op_case("tree_expand"), setting, BANDWIDTH)[-1]
    assert (found.candidate, found.status, found.why) == ("sglang", "wrong", "5 results instead of 6")
    setting = replace(SETTING, peers=OnePeer((), function=lambda *a, **k: (*reference(*a, **k)[:5], None)))
    found = run_case(op_case("tree_expand"), setting, BANDWIDTH)[-1]
    assert found.status == "ok" and found.us is not None  # a peer may lack one, and says so


@pytest.mark.parametrize("op", [op for op in OPS if bench_of(op).CHECK != "exact"])
def test_nan_gets_no_time(op: str, serve: Callable[..., None]) -> None:
    serve(op, off_by(lambda: torch.nan))
    result = ours(op_case(op, batch=2))
    assert result.status == "wrong" and result.us is None and "not finite" in result.why


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (lambda ids: ids.flip(-1), "deviates too far from fp64"),
        (lambda ids: ids - 1000, "token -"),
        (lambda ids: torch.full_like(ids, 64), "token 64 is no candidate of its row"),
        (lambda ids: ids[..., :1].expand_as(ids), "a row has the same token twice"),
    ],
)
@pytest.mark.parametrize("op", ["lm_head_topk", "centroid_topk"])
def test_a_wrong_token_gets_no_time(op: str, token: Any, why: str, serve: Callable[..., None]) -> None:
    serve(op, lambda found: (found[0], token(found[1]), found[2]))
    result = ours(op_case(op, batch=2, topk=3))
    assert result.status == "wrong" and result.why.startswith(why) and result.us is None


@pytest.mark.parametrize("number", [0, -1])
def test_the_first_and_the_last_set_are_looked_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right for every input but those of one set."""
    case = op_case("norm_linear")
    setting = replace(SETTING, cache_bytes=1 << 20)
    sets = OpProblem(case, CPU, setting.cache_bytes).sets
    assert len(sets) > 2
    only = sets[number].args[0]
    reference = OPS["norm_linear"].reference

    def kernel(x: Tensor, *others: Any) -> Tensor:
        return reference(x, *others) + (0.1 if torch.equal(x, only) else 0.0)

    monkeypatch.setattr(OPS["norm_linear"], "kernels", (Kernel("triton", ("cpu",), lambda: kernel),))
    monkeypatch.setattr(OPS["norm_linear"], "loaded", {})
    assert ours(case, setting).status == "wrong"


def test_a_kernel_that_raises_is_a_row_and_the_others_are_timed(serve: Callable[..., None]) -> None:
    def fail(found: Tensor) -> Tensor:
        raise RuntimeError("no such tile\n" + "x" * 1000)

    serve("norm_linear", fail)
    mine, pytorch = run_case(op_case("norm_linear"), SETTING, BANDWIDTH)
    assert mine.status == "error" and mine.why.startswith("RuntimeError: no such tile") and len(mine.why) == 300
    assert mine.us is None and mine.implementation == "triton"
    assert pytorch.status == "ok" and pytorch.us is not None


def test_a_wrong_kernel_makes_a_step_wrong(serve: Callable[..., None]) -> None:
    case = step_case("step", batch=2)
    serve("linear_norm_add", lambda found: found)
    right = ours(case)
    assert right.status == "ok" and right.us is not None and "triton" in right.implementation.split("+")
    serve("linear_norm_add", off_by(lambda: 0.05))
    mine, pytorch = run_case(case, SETTING, BANDWIDTH)
    assert (mine.status, mine.us, mine.why) == ("wrong", None, "deviates too far from fp64")
    assert pytorch.status == "ok" and pytorch.us is not None
    serve("linear_norm_add", lambda found: found)
    serve("centroid_topk", lambda found: (found[0], found[1] + 1000, found[2]))
    wrong = ours(case)
    assert wrong.status == "wrong" and "is no candidate of its row" in wrong.why and wrong.us is None


def halved(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found[0] / 2, *found[1:])


def turned(place: int) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda found: (*found[:place], found[place].roll(1, -1), *found[place + 1 :])


@pytest.mark.parametrize(
    ("topk", "op", "change"),
    [
        (1, "centroid_topk", halved),
        (1, "norm_geglu", off_by(lambda: 0.05)),
        (3, "centroid_topk", halved),
        (3, "draft_attention", off_by(lambda: 0.5)),
        (3, "tree_expand", turned(0)),  # other tokens than the best grow
        (3, "tree_expand", turned(3)),  # from other candidates
        (3, "tree_build", turned(1)),
        (3, "tree_build", turned(4)),
    ],
)
def test_a_wrong_kernel_makes_a_round_wrong(topk: int, op: str, change: Any, serve: Callable[..., None]) -> None:
    case = step_case("round", topk, batch=2)
    serve(op, lambda found: found)
    assert ours(case).us is not None
    serve(op, change)
    result = ours(case)
    assert result.status == "wrong" and result.us is None


@pytest.mark.skipif(bool(_native.cpu_library()), reason="the C++ library is not built")
@pytest.mark.parametrize("level", ["step", "round"])
def test_a_wrong_whole_step_gets_no_time(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU what is timed is the library's whole step, not the ops."""
    monkeypatch.delenv("MTP_FORCE_IMPL", raising=False)
    case = step_case(level, batch=2)
    right = ours(case)
    assert right.us is not None and right.implementation == "cpu, whole step"
    made = captured.cpu_chain

    def wrong(*args: Any) -> Any:
        chain = made(*args)

        def changed(*inputs: Any) -> Any:
            logprobs, ids, states = chain(*inputs)
            return logprobs, (ids + 1) % 64, states

        return changed

    monkeypatch.setattr(run_steps, "cpu_chain", wrong)
    monkeypatch.setattr(captured, "cpu_chain", wrong)
    result = ours(case)
    assert result.status == "wrong" and result.us is None


def test_a_peer_is_checked_as_ours_is() -> None:
    case = op_case("draft_attention", batch=2, variant="full_attention")

    def peer(error: float) -> Result:
        def make(k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, **sizes: Any) -> Any:
            assert (sizes.pop("num_qo_heads"), sizes.pop("rows")) == (4, 1)
            others = (k_cache, v_cache, table, lens, sizes.pop("sm_scale"))
            return lambda q: bench_of("draft_attention").pytorch(q, *others, **sizes) + error

        mine, _, found = run_case(case, replace(SETTING, peers=OnePeer((), make=make)), BANDWIDTH)
        assert mine.us is not None and found.candidate == "vllm"
        return found

    assert peer(0.0).status == "ok" and peer(0.0).us is not None
    assert peer(0.01).status == "wrong" and peer(0.01).us is None
