"""The benchmark's levels: every op is measured and its bytes counted, a wrong kernel gets no time."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness import forced, results
from mtp_kernels.bench import run_generate, run_steps, runner
from mtp_kernels.bench.case import Case, Result, Unsupported
from mtp_kernels.bench.inputs import config_of
from mtp_kernels.bench.ops import bench_of
from mtp_kernels.bench.peers import Peers
from mtp_kernels.bench.run_ops import OpProblem
from mtp_kernels.bench.run_steps import StepProblem
from mtp_kernels.bench.runner import _weights, run_case
from mtp_kernels.bench.setting import Setting
from mtp_kernels.bench.timing import Times
from torch import Tensor

from mtp_kernels import _native, captured
from mtp_kernels.ops import OPS
from mtp_kernels.ops._registry import Kernel

CPU = torch.device("cpu")
BANDWIDTH = 1e9
SETTING = Setting(CPU, cache_bytes=1 << 12, peers=Peers(()), compile_ops=False, compile_steps=False, samples=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These sizes gain nothing from a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def op_case(op: str, **sizes: Any) -> Case:
    """A case of the op with every size tiny, of the model that has the op."""
    model = "tiny" if bench_of(op).variants(config_of("tiny")) else "tiny-dense"
    sizes = {"model": model, "context": 21, "dtype": "fp32", "kv_dtype": "fp32", "mode": "eager", **sizes}
    return Case("op", op, **{"variant": bench_of(op).variants(config_of(sizes["model"]))[0], **sizes})


def step_case(level: str, topk: int = 1, **sizes: Any) -> Case:
    name = "step" if level == "step" else "chain" if topk == 1 else "tree"
    sizes = {"model": "tiny", "context": 21, "dtype": "fp32", "kv_dtype": "fp32", "mode": "eager", **sizes}
    return Case(level, name, rows=topk, topk=topk, num_steps=3, **sizes)


def ours(case: Case, setting: Setting = SETTING) -> Result:
    (result,) = (r for r in run_case(case, setting, BANDWIDTH) if r.candidate == "mtp")
    return result


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives an op one kernel, which makes its results from the right ones."""
    monkeypatch.delenv("MTP_FORCE_IMPL", raising=False)
    monkeypatch.setattr(run_steps, "choose_kernels", lambda *args: ("ops", "the ops are what is tested"))

    def fill(op: str, change: Callable[..., Any]) -> None:
        reference = OPS[op].reference

        def kernel(*args: Any, **kwargs: Any) -> Any:
            return change(reference(*args, **kwargs))

        monkeypatch.setattr(OPS[op], "kernels", (Kernel("triton", ("cpu",), lambda: kernel),))
        monkeypatch.setattr(OPS[op], "loaded", {})

    return fill


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


@dataclass(frozen=True)
class OnePeer(Peers):
    """A peer with an attention kernel or an op of the test's."""

    make: Any = None
    function: Any = None

    def attention_variants(self, name: str) -> dict[str, Any]:
        return {name: self.make} if self.make and name == "vllm" else {}

    def op(self, name: str, op: str) -> Any:
        return (lambda call: lambda: self.function(*call.args, **call.kwargs), tuple) if self.function else None


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


def test_a_peer_that_refuses_a_case_says_why() -> None:
    def make(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported("num_kv_heads 2")

    setting = replace(SETTING, peers=OnePeer((), make=make))
    found = run_case(op_case("draft_attention"), setting, BANDWIDTH)
    assert [(r.candidate, r.status, r.why) for r in found[2:]] == [("vllm", "unsupported", "num_kv_heads 2")]


def test_inputs_that_do_not_fit_are_an_error_of_the_case() -> None:
    (result,) = run_case(op_case("draft_attention", context=10**15), SETTING, BANDWIDTH)
    assert (result.candidate, result.status, result.us) == ("mtp", "error", None) and "RuntimeError" in result.why


GENERATE = Case("generate", "generate", "pair", dtype="fp32", kv_dtype="fp32", mode="eager")


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


@pytest.mark.parametrize(("level", "calls"), [("op", 1), ("step", 3), ("round", 1), ("generate", 96)])
def test_times_are_of_one_op_step_round_or_token(level: str, calls: int) -> None:
    case = op_case("commit") if level == "op" else GENERATE if level == "generate" else step_case(level)
    found = runner._with_times(Result(case, "mtp", nodes=96), Times(960, 480, 1920, 7))
    assert (found.us, found.p10, found.p90) == (960 / calls, 480 / calls, 1920 / calls)
    assert (found.nodes, found.samples) == (96 // calls, 7)


def test_samples_and_seconds_of_the_setting_count() -> None:
    assert ours(op_case("commit"), replace(SETTING, samples=7, seconds=100.0)).samples == 7
    assert ours(op_case("commit"), replace(SETTING, samples=7, seconds=0.0)).samples == 3
