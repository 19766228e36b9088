"""The benchmark's levels: every op is measured and its bytes counted, every step and round is timed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_cases import (  # noqa: F401 - a fixture
    BANDWIDTH,
    CPU,
    GENERATE,
    SETTING,
    OnePeer,
    one_kernel,
    op_case,
    ours,
    step_case,
)
from harness import forced
from mtp_kernels.bench import runner
from mtp_kernels.bench.case import Case, Result, Unsupported
from mtp_kernels.bench.inputs import config_of
from mtp_kernels.bench.ops import bench_of
from mtp_kernels.bench.run_ops import OpProblem
from mtp_kernels.bench.run_steps import StepProblem
from mtp_kernels.bench.runner import _weights, run_case
from mtp_kernels.bench.timing import Times

from mtp_kernels.ops import OPS

pytestmark = pytest.mark.usefixtures("one_thread")  # these sizes gain nothing from a second one


def test_every_op_has_what_the_benchmark_asks_of_it() -> None:
    models = [config_of(model) for model in ("E2B", "31B", "tiny", "tiny-dense", "pair")]
    for op in OPS:
        bench = bench_of(op)
        assert bench.CHECK in ("floats", "exact", "head", "candidates")
        assert all(callable(getattr(bench, name)) for name in ("variants", "make", "moved", "flops"))
        assert bench.pytorch is None or callable(bench.pytorch)
        assert any(bench.variants(model) for model in models)
        assert all(len(set(bench.variants(model))) == len(bench.variants(model)) for model in models)
    with pytest.raises(ValueError, match=r"^--ops: expected names of .*norm_linear, .*, got 'norm_liner'$"):
        bench_of("norm_liner")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_the_reference_of_every_op_is_right_and_timed(op: str, dtype: str) -> None:
    model = op_case(op).model
    for variant in bench_of(op).variants(config_of(model)):
        for batch, rows in itertools.product((1, 3), (1, 4)):
            sizes = {"batch": batch, "rows": rows, "dtype": dtype, "kv_dtype": dtype}
            case = op_case(op, model=model, variant=variant, **sizes)
            with forced("reference"):
                found = {r.candidate: r for r in run_case(case, replace(SETTING, samples=1), BANDWIDTH)}
            assert set(found) == ({"mtp", "pytorch"} if bench_of(op).pytorch else {"mtp"})
            assert found["mtp"].implementation == "reference"
            for result in found.values():
                assert (result.status, result.why) == ("ok", ""), case
                assert result.us is not None and result.us > 0 and result.p10 is not None and result.p90 is not None
                assert result.p10 <= result.us <= result.p90 and result.samples == 1
                assert result.bytes > 0 and result.flops > 0 and result.floor_us == result.bytes / BANDWIDTH * 1e6
                assert result.error is not None and result.allowed is not None and result.error <= result.allowed
                assert Result.from_json(json.loads(json.dumps(result.as_json()))) == result


@pytest.mark.parametrize("op", OPS)
def test_what_serves_an_op_here_is_right(op: str) -> None:
    """In the sizes of the trained pair, whose head is a centroid head; kernels where they are built."""
    model = "pair" if bench_of(op).variants(config_of("pair")) else "tiny-dense"
    assert ours(op_case(op, model=model, batch=2, rows=3)).status == "ok"


@pytest.mark.parametrize("topk", [2, 5])
@pytest.mark.parametrize("op", ["lm_head_topk", "centroid_topk"])
def test_heads_of_several_tokens(op: str, topk: int) -> None:
    assert ours(op_case(op, batch=2, rows=2, topk=topk)).status == "ok"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("variant", ["sliding_attention", "full_attention"])
def test_attention_over_every_kind_of_cache(variant: str, kv_dtype: str, layout: str) -> None:
    sizes = {"variant": variant, "dtype": "bf16", "kv_dtype": kv_dtype, "layout": layout}
    for page_size, batch in ((1, 2), (16, 10), (64, 1)):  # 10: more requests than the check looks at together
        found = run_case(op_case("draft_attention", page_size=page_size, batch=batch, **sizes), SETTING, BANDWIDTH)
        assert [(r.candidate, r.status) for r in found] == [("mtp", "ok"), ("pytorch", "ok")]


def moved(op: str, **sizes: Any) -> tuple[int, int]:
    """Bytes and operations of the model of the op."""
    problem = OpProblem(op_case(op, dtype="bf16", kv_dtype="bf16", **sizes), CPU, 0)
    return problem.bytes, problem.flops


def test_bytes_and_flops_counted_by_hand() -> None:
    """The tiny model: hidden 32, 4 query heads; sliding layers with 2 KV heads of 64 that see 8 keys, full ones with 1
    of 128; vocab 64; 8 centroids, 2 of them active. Two bytes a number."""
    weight, rows = 4 * 64 * 32, 3 * 2  # of the sliding layer's query projection
    assert moved("norm_linear", batch=3, rows=2) == (
        2 * (weight + 32 + rows * 32 + rows * 256), 2 * rows * 32 * 256)
    q = 3 * 2 * 4 * 64
    for context, visible in ((21, 8), (5, 5)):
        keys = 3 * visible * 2 * 64
        assert moved("draft_attention", batch=3, rows=2, context=context) == (
            2 * (q + q + 2 * keys), 2 * 2 * visible * q)
    q = 2 * 4 * 128
    assert moved("draft_attention", rows=2, variant="full_attention", context=21) == (
        2 * (q + q + 2 * 21 * 128), 2 * 2 * 21 * q)
    # k logprobs (fp32) and ids (int64), and a logsumexp, for each row.
    assert moved("lm_head_topk", batch=3, rows=2, topk=4) == (
        2 * (64 * 32 + 6 * 32) + 6 * (4 * 12 + 4), 2 * 6 * 32 * 64)
    # Of the head 2 centroids' 16 rows, with the ordering's entry for each; two rows need at most 32.
    assert moved("centroid_topk", batch=2) == (
        2 * (2 * 32 + 8 * 32) + 32 * (2 * 32 + 8) + 2 * (12 + 4), 2 * 2 * 32 * (8 + 16))
    assert moved("centroid_topk", batch=50)[0] == (
        2 * (50 * 32 + 8 * 32) + 64 * (2 * 32 + 8) + 50 * (12 + 4))  # no more than the whole head
    # accept_index, num_accepted, accept_ids of 3 nodes; stop id; a row of 40 read and written; 17 bytes of counts.
    accepted = moved("commit", batch=2, num_steps=2)[0]
    assert accepted == 2 * (3 * 8 + 8 + 3 * 8 + 3 * 8) + 8 + 2 * (2 * 40 * 2 + 17)


def test_bytes_of_a_step_and_of_rounds() -> None:
    hidden, backbone, inner, heads = 32, 40, 48, 4
    layers = 0
    for dim in (64, 128):
        q = heads * dim
        layers += q * hidden + dim + hidden * q + 2 * inner * hidden + hidden * inner + 4 * hidden + 1
    own = layers + hidden * 2 * backbone + hidden + backbone * hidden + 8 * hidden  # the last: centroids
    frequencies = 4 * (32 + 16)  # bytes, of the pairs that turn
    keys = 2 * (8 * 2 * 64 + 21 * 1 * 128)

    def expected(batch: int, rows: int) -> int:
        head = min(batch * rows * 16, 64) * hidden
        return 2 * (own + head + batch * keys + 3 * batch * rows * backbone) + frequencies

    def bytes_of(case: Case) -> int:
        return StepProblem(case, CPU, _weights(case.model, case.torch_dtype, CPU)).bytes

    bf16 = {"dtype": "bf16", "kv_dtype": "bf16"}
    assert bytes_of(step_case("step", batch=2, **bf16)) == expected(2, 1)
    assert bytes_of(step_case("round", batch=1, **bf16)) == 3 * expected(1, 1)
    assert bytes_of(step_case("round", topk=3, batch=2, **bf16)) == expected(2, 1) + 2 * expected(2, 3)
    fp8 = bytes_of(step_case("step", batch=2, dtype="bf16", kv_dtype="fp8"))
    assert expected(2, 1) - fp8 == 2 * keys


def test_sets_of_inputs_exceed_the_cache_and_differ() -> None:
    case = op_case("norm_linear")
    one = OpProblem(case, CPU, cache_bytes=0)
    assert len(one.sets) == 1
    problem = OpProblem(case, CPU, cache_bytes=one.bytes)
    assert len(problem.sets) == 2
    first, second = (call.args[0] for call in problem.sets)
    assert not torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    assert torch.equal(first, OpProblem(case, CPU, cache_bytes=0).sets[0].args[0])  # the same in every run
    assert len(OpProblem(case, CPU, cache_bytes=1 << 40).sets) == 4
    assert len(OpProblem(replace(case, warm=True), CPU, cache_bytes=1 << 40).sets) == 1
    result = ours(case, replace(SETTING, cache_bytes=one.bytes))
    assert result.rotation_bytes == 2 * result.bytes == 2 * one.bytes


def test_a_step_names_everything_that_serves_it(serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    for op in OPS:
        monkeypatch.setattr(OPS[op], "kernels", ())
    assert ours(step_case("step")).implementation == "reference"
    serve("post_project", lambda found: found)
    assert ours(step_case("step")).implementation == "reference+triton"
    assert ours(step_case("round", 3)).implementation == "reference+triton"


@pytest.mark.parametrize("model", ["tiny", "tiny-dense", "pair"])
@pytest.mark.parametrize(("level", "topk"), [("step", 1), ("round", 1), ("round", 3)])
def test_steps_and_rounds_are_right_and_timed(level: str, topk: int, model: str) -> None:
    for dtype, batch in (("bf16", 1), ("fp32", 3)):
        case = step_case(level, topk, model=model, batch=batch, dtype=dtype, kv_dtype=dtype)
        found = run_case(case, SETTING, BANDWIDTH)
        assert [r.candidate for r in found] == (["mtp", "pytorch"] if level == "step" else ["mtp"])
        for result in found:
            assert result.status == "ok" and result.us is not None and result.floor_us is not None, result


def test_a_peer_that_refuses_a_case_says_why() -> None:
    def make(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported("num_kv_heads 2")

    setting = replace(SETTING, peers=OnePeer((), make=make))
    found = run_case(op_case("draft_attention"), setting, BANDWIDTH)
    assert [(r.candidate, r.status, r.why) for r in found[2:]] == [("vllm", "unsupported", "num_kv_heads 2")]


def test_inputs_that_do_not_fit_are_an_error_of_the_case() -> None:
    (result,) = run_case(op_case("draft_attention", context=10**15), SETTING, BANDWIDTH)
    assert (result.candidate, result.status, result.us) == ("mtp", "error", None) and "RuntimeError" in result.why


@pytest.mark.parametrize(("level", "calls"), [("op", 1), ("step", 3), ("round", 1), ("generate", 96)])
def test_times_are_of_one_op_step_round_or_token(level: str, calls: int) -> None:
    case = op_case("commit") if level == "op" else GENERATE if level == "generate" else step_case(level)
    found = runner._with_times(Result(case, "mtp", nodes=96), Times(960, 480, 1920, 7))
    assert (found.us, found.p10, found.p90) == (960 / calls, 480 / calls, 1920 / calls)
    assert (found.nodes, found.samples) == (96 // calls, 7)


def test_samples_and_seconds_of_the_setting_count() -> None:
    assert ours(op_case("commit"), replace(SETTING, samples=7, seconds=100.0)).samples == 7
    assert ours(op_case("commit"), replace(SETTING, samples=7, seconds=0.0)).samples == 3
