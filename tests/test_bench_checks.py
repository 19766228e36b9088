"""What the benchmark accepts as right: deviations from fp64, ranked tokens, whole steps and rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtp_kernels.bench.case import Case
from mtp_kernels.bench.checks import ATOL, HeadOracle, Verdict, check_exact, check_floats
from mtp_kernels.bench.ops.centroid_logits import pytorch_candidates
from mtp_kernels.bench.ops.draft_attention import naive
from mtp_kernels.bench.oracle import AT_ONCE
from mtp_kernels.bench.peers import Peers
from mtp_kernels.bench.run_steps import StepProblem, candidates
from mtp_kernels.bench.runner import _weights
from mtp_kernels.bench.setting import Setting
from torch import Tensor

from mtp_kernels.draft import DraftTree
from mtp_kernels.heads import reorder_lm_head

pytestmark = pytest.mark.usefixtures("one_thread")  # these sizes gain nothing from a second one
CPU = torch.device("cpu")
EXACT = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
NAIVE = EXACT.float() + torch.tensor([[0.0, 0.01], [0.0, 0.0]])
ALLOWED = 2 * 0.01 + 4 * ATOL


def test_floats_may_err_twice_as_much_as_plain_pytorch() -> None:
    for error, right in ((0.0, True), (0.019, True), (-0.019, True), (0.021, False), (-0.021, False)):
        got = EXACT.clone()
        got[1, 0] += error
        verdict = check_floats([got], [EXACT], [NAIVE])
        assert verdict.ok == right
        assert verdict.error == pytest.approx(abs(error)) and verdict.allowed == pytest.approx(ALLOWED, rel=1e-4)


def test_every_result_is_looked_at_and_none_may_be_missing() -> None:
    bad = EXACT + 1
    assert check_floats([EXACT, EXACT], [EXACT, EXACT], [NAIVE, NAIVE]).ok
    for got in ([bad, EXACT], [EXACT, bad]):
        assert not check_floats(got, [EXACT, EXACT], [NAIVE, NAIVE]).ok
    assert check_floats([None, EXACT], [EXACT, EXACT], [NAIVE, NAIVE]).ok  # a peer that lacks a result says so
    for got in ([], [EXACT], [EXACT, EXACT, EXACT]):
        assert check_floats(got, [EXACT] * 2, [NAIVE] * 2).why == f"{len(got)} results instead of 2"
        assert check_exact(got, [EXACT] * 2).why == f"{len(got)} results instead of 2"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_wrong(value: float) -> None:
    got = EXACT.clone()
    got[0, 1] = value
    assert check_floats([got], [EXACT], [NAIVE]).why == "a result is not finite"
    assert "result 0 is not finite where" in check_exact([got], [EXACT]).why
    assert "result 0 is not finite where" in check_exact([EXACT], [got]).why
    assert check_exact([got], [got]).ok == (value == value)  # the same infinity is right


def test_a_wrong_shape_is_wrong_even_where_it_broadcasts() -> None:
    row = EXACT[:1]
    assert check_floats([row], [EXACT], [NAIVE]).why == "shape [1, 2] instead of [2, 2]"
    assert check_exact([row], [EXACT]).why == "result 0 has shape [1, 2] instead of [2, 2]"
    assert check_floats([EXACT[:0]], [EXACT[:0]], [NAIVE[:0]]).ok and check_exact([EXACT[:0]], [EXACT[:0]]).ok


def test_exact_results() -> None:
    ids, mask = torch.tensor([5, 6, 7]), torch.tensor([True, False, True])
    assert check_exact([ids.int(), mask], [ids, mask]).ok
    assert check_exact([ids, mask], [ids + torch.tensor([0, 0, 1]), mask]).why == "result 0: 1 of 3 differ"
    assert check_exact([ids, ~mask], [ids, mask], ["ids", "mask"]).why == "mask: 3 of 3 differ"
    assert check_exact([ids.float() + 0.4], [ids]).why == "result 0: 3 of 3 differ"
    large = torch.tensor([1000.0, -0.5])
    assert check_exact([large * (1 + ATOL / 2)], [large]).ok  # relative beyond 1
    assert not check_exact([large * (1 + 3 * ATOL)], [large]).ok


def test_the_worse_verdict_stays() -> None:
    good, near, bad = Verdict(0.1, 1.0), Verdict(0.9, 1.0), Verdict(2.0, 1.0)
    said, no_number = Verdict(why="because"), Verdict(float("nan"), 1.0)
    order = [good, near, bad, said]
    for i, one in enumerate(order):
        for two in order[i:]:
            assert one.worse(two) == two and two.worse(one) == two
    assert not no_number.ok
    assert not good.worse(no_number).worse(good).ok  # what comes after a NaN does not hide it


LOGITS = torch.tensor([[3.0], [2.99], [1.0], [0.0]], dtype=torch.float64)  # of a hidden state of one number


def dense() -> HeadOracle:
    """Plain PyTorch errs by 0.006 in the largest logit, so 0.012 is allowed."""
    return HeadOracle(torch.tensor([[1.0]]).double(), torch.tensor([[1.002]]).double(), LOGITS)


def logprobs_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = LOGITS[:, 0]
    return (logits[ids] - logits.logsumexp(0)), logits.logsumexp(0).view(1)


@pytest.mark.parametrize(
    ("ids", "why", "right"),
    [
        ([0], "", True),
        ([1], "", True),  # 0.01 behind the best
        ([2], "", False),
        ([0, 1], "", True),
        ([1, 0], "", True),
        ([0, 2], "", False),
        ([0, 1, 3], "", False),
        ([0, 1, 2, 3], "", True),
        ([0, 0], "a row has the same token twice", False),
        ([0, 2, 0], "a row has the same token twice", False),
        ([4], "token 4 is no candidate of its row", False),
        ([0, -1], "token -1 is no candidate of its row", False),
    ],
)
def test_a_near_tie_may_be_picked_and_nothing_worse(ids: list[int], why: str, right: bool) -> None:
    verdict = dense().check(torch.tensor([ids]))
    assert (verdict.ok, verdict.why) == (right, why)


def test_the_numbers_of_a_head() -> None:
    ids = torch.tensor([[0, 1]])
    logprobs, total = logprobs_of(ids)
    oracle = dense()
    assert oracle.check(ids, logprobs, total).ok
    assert oracle.check(ids, logprobs + 0.011, total - 0.011).ok
    for numbers in ((logprobs + 0.013, total), (logprobs, total + 0.013), (logprobs.flip(-1) + 0.005, total - 0.02)):
        verdict = oracle.check(ids, *numbers)
        assert not verdict.ok and not verdict.why and verdict.allowed == pytest.approx(0.012, rel=1e-3)
    holes = logprobs.clone()
    holes[0, 1] = torch.nan
    assert oracle.check(ids, holes, total).why == "a logprob is not finite"
    assert oracle.check(ids, logprobs, total * torch.inf).why == "a logsumexp is not finite"
    rough = logprobs + 0.013
    assert oracle.check(ids, rough, total, sums=torch.full_like(logprobs, -2000.0)).ok  # 2000 has no more digits


@pytest.mark.parametrize(("size", "allowed"), [(4.0, 12 * ATOL), (0.1, ATOL)])
def test_what_fp32_sums_may_differ_by_grows_with_the_logits(size: float, allowed: float) -> None:
    """Where plain PyTorch makes no error."""
    one, logits = torch.tensor([[1.0]]).double(), size * LOGITS  # up to 12, and up to 0.3
    oracle, ids = HeadOracle(one, one, logits), torch.tensor([[0]])
    logprobs = logits[:, 0].log_softmax(0)[ids]
    assert oracle.check(ids, logprobs + 0.9 * allowed).ok
    verdict = oracle.check(ids, logprobs + 1.1 * allowed)
    assert not verdict.ok and verdict.allowed == pytest.approx(allowed)


def test_one_row_among_many_is_enough_to_be_wrong() -> None:
    normed = torch.ones(5, 1).double()
    oracle = HeadOracle(normed, normed * 1.002, LOGITS)
    ids = torch.zeros(5, 1, dtype=torch.int64)
    assert oracle.check(ids).ok
    ids[3] = 2
    assert not oracle.check(ids).ok


# Four centroids of two tokens each; the second and the third score 1.0 and 0.999.
CENTROIDS = torch.tensor([[2.0, 0], [1.0, 0], [0.999, 0], [-1.0, 0]]).double()
ORDERING = torch.tensor([3, 7, 0, 4, 6, 1, 2, 5])
HEAD = torch.tensor([[0, logit] for logit in (0.5, 0.4, 9.0, 1.0, 0.2, 9.0, 0.3, 0.8)]).double()  # by token


def centroid(active: int = 2, naive: float = 1.001, ordered: bool = False) -> HeadOracle:
    head = HEAD[ORDERING] if ordered else HEAD
    normed, rough = torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[naive, 1.0]]).double()
    return HeadOracle(normed, rough, head, CENTROIDS, ORDERING, active, ordered)


def tokens(*centroids: int) -> Tensor:
    return ORDERING.view(4, 2)[list(centroids)].flatten().unsqueeze(0)


@pytest.mark.parametrize("ordered", [False, True])
def test_centroids_that_tie_may_each_be_active(ordered: bool) -> None:
    oracle = centroid(ordered=ordered)
    for chosen in ((0, 1), (0, 2)):
        ids = tokens(*chosen)
        logits = HEAD[ids, 1]
        assert oracle.check_candidates(logits.float(), ids).ok
        best = logits.topk(3)
        total = logits.logsumexp(-1)
        assert oracle.check(ids.gather(1, best.indices), best.values - total.unsqueeze(-1), total).ok
    assert oracle.check_candidates(HEAD[tokens(1, 2), 1], tokens(1, 2)).why == (
        "a row lacks a token of one of its best centroids")
    for chosen in ((0, 3), (3, 0)):  # token 2 has the largest logit of all, in the worst centroid
        assert oracle.check_candidates(HEAD[tokens(*chosen), 1], tokens(*chosen)).why == (
            "token 2 is no candidate of its row")
    assert oracle.check(torch.tensor([[2]])).why == "token 2 is no candidate of its row"
    twice = tokens(0, 0)
    assert oracle.check_candidates(HEAD[twice, 1], twice).why == "a row has the same token twice"


def test_centroids_apart_are_certain() -> None:
    oracle = centroid(naive=1.0001)  # its scores err by 0.0002: nothing lies that near to 1
    ids = tokens(0, 1)
    assert oracle.check_candidates(HEAD[ids, 1], ids).ok
    assert oracle.check_candidates(HEAD[tokens(0, 2), 1], tokens(0, 2)).why == "token 6 is no candidate of its row"
    total = HEAD[ids, 1].logsumexp(-1)
    assert oracle.check(torch.tensor([[3]]), 1.0 - total.unsqueeze(-1), total).ok
    for numbers in ((1.001 - total.unsqueeze(-1), total), (1.0 - total.unsqueeze(-1), total + 0.001)):
        assert not oracle.check(torch.tensor([[3]]), *numbers).ok
    wrong = HEAD[ids, 1] + torch.tensor([0, 0, 0.001, 0])
    assert not oracle.check_candidates(wrong, ids).ok
    assert oracle.check_candidates(wrong * torch.nan, ids).why == "a logit is not finite"


def test_numbers_are_checked_where_no_centroid_is_certain() -> None:
    tied = torch.tensor([[1.0, 0], [1.0, 0], [1.0, 0], [-1.0, 0]]).double()
    normed = torch.tensor([[1.0, 1.0]]).double()
    oracle = HeadOracle(normed, normed * 1.0001, HEAD, tied, ORDERING, 1)
    for chosen in range(3):
        ids = tokens(chosen)
        total = HEAD[ids, 1].logsumexp(-1)
        assert oracle.check(ids[:, :1], HEAD[ids[:, :1], 1] - total.unsqueeze(-1), total).ok
    assert not oracle.check(torch.tensor([[3]]), torch.tensor([[-9.0]]), torch.tensor([1.5])).ok
    assert not oracle.check(torch.tensor([[3]]), torch.tensor([[-0.5]]), torch.tensor([9.0])).ok


def test_with_every_centroid_active_all_tokens_are_candidates() -> None:
    oracle = centroid(active=4)
    assert oracle.check_candidates(HEAD[:, 1].unsqueeze(0), torch.arange(8).unsqueeze(0)).ok
    assert oracle.check(torch.tensor([[2, 5]])).ok and not oracle.check(torch.tensor([[2, 3]])).ok


SETTING = Setting(CPU, 1 << 16, Peers(()), False, False, 1, 0.0)
MANY = AT_ONCE + 3  # requests: more than are looked at together


def right_results(level: str, topk: int = 1, batch: int = MANY, **sizes: Any) -> tuple[StepProblem, list[Tensor]]:
    """A problem in fp32, and what ours gives."""
    name = "step" if level == "step" else "chain" if topk == 1 else "tree"
    sizes = {"model": "tiny", "context": 21, "num_steps": 3, "dtype": "fp32", "kv_dtype": "fp32", **sizes}
    case = Case(level, name, batch=batch, rows=topk, topk=topk, mode="eager", **sizes)
    problem = StepProblem(case, CPU, _weights(case.model, case.torch_dtype, CPU))
    ours = candidates(case, problem, SETTING)[0]
    with torch.no_grad():
        raw = ours.bind(problem.inputs)()
    return problem, list(ours.results(raw))


@pytest.mark.parametrize("model", ["tiny", "tiny-dense"])
def test_steps_that_are_right(model: str) -> None:
    problem, results = right_results("step", model=model)
    verdict = problem.check(0, results)
    assert verdict.ok and 0 < verdict.error < verdict.allowed < 1e-3
    assert problem.check(0, results[:-1]).why == "5 results instead of 6"


@pytest.mark.parametrize("request_", [0, MANY - 1])
@pytest.mark.parametrize("step", [0, 2])
def test_steps_that_are_wrong(request_: int, step: int) -> None:
    problem, results = right_results("step")

    def changed(place: int, value: Any) -> Any:
        copy = [r.clone() for r in results]
        copy[place][request_] = value(copy[place][request_])
        return problem.check(0, copy)

    states = 3 + step
    verdict = changed(states, lambda state: state + 0.01)
    assert not verdict.ok and verdict.error == pytest.approx(0.01, rel=0.01)
    assert changed(states, lambda state: state * torch.nan).why == "a result is not finite"
    assert not changed(step, lambda token: _other_candidate(problem, step, request_, results)).ok
    for token in (-1, 64, 1 << 40):
        assert changed(step, lambda _, token=token: torch.tensor(token)).why == (
            f"token {token} is no candidate of its row")


def _other_candidate(problem: StepProblem, step: int, request: int, results: list[Tensor]) -> Tensor:
    """A candidate that is not the best: the second of what the library ranks there."""
    from mtp_kernels.draft import draft_step

    one = problem.inputs
    ids, state = one.seed_ids.unsqueeze(1), one.state.unsqueeze(1)
    for number in range(step + 1):
        found = draft_step(one.weights, one.kv, ids, state, one.positions, topk=2)
        ids, state = results[number].unsqueeze(1), found.state
    return found.token_ids[request, 0, 1]


@pytest.mark.parametrize("model", ["tiny", "tiny-dense"])
@pytest.mark.parametrize("topk", [1, 3])
def test_rounds_that_are_right(topk: int, model: str) -> None:
    problem, results = right_results("round", topk, model=model)
    verdict = problem.check(0, results)
    assert verdict.ok and verdict.allowed < 1e-3
    assert problem.check(0, results[:-1]).why == "9 results instead of 10"


FIELDS = [name for name in DraftTree._fields if not name.startswith("cand_")]


@pytest.mark.parametrize("topk", [1, 3])
def test_rounds_that_are_wrong(topk: int) -> None:
    problem, results = right_results("round", topk)
    tree = DraftTree._make(results)

    def verdict(**changes: Tensor) -> Verdict:
        return problem.check(0, list(tree._replace(**changes)))

    last = tree.cand_scores.clone()
    last[-1, -1] -= 0.001
    found = verdict(cand_scores=last)
    assert not found.ok and (found.why or found.error == pytest.approx(0.001, rel=0.05))
    first = tree.cand_scores.clone()
    first[:, 0] = torch.nan
    assert verdict(cand_scores=first).why == "a logprob is not finite"
    swapped = tree.cand_ids.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert not verdict(cand_ids=swapped).ok
    for place in (0, -1):  # what grows from it is not looked at
        unknown = tree.cand_ids.clone()
        unknown[place, place] = 64
        assert verdict(cand_ids=unknown).why == "token 64 is no candidate of its row"
    assert "cand_ids has shape" in verdict(cand_ids=tree.cand_ids[:, 1:]).why
    for field in FIELDS:
        before = getattr(tree, field)
        if before is None:
            continue
        after = before.clone()
        after[-1, -1] = ~after[-1, -1] if after.dtype == torch.bool else after[-1, -1] + 1
        assert verdict(**{field: after}).why.startswith(f"{field}: "), field


def test_a_worse_token_is_wrong_even_where_the_rest_follows_from_it() -> None:
    """A drafter that takes the second best token in its first step, and goes on rightly from there."""
    from mtp_kernels.draft import draft_step

    problem, _ = right_results("step", batch=2)
    one = problem.inputs
    ids, state = one.seed_ids.unsqueeze(1), one.state.unsqueeze(1)
    tokens, states = [], []
    for step in range(3):
        found = draft_step(one.weights, one.kv, ids, state, one.positions, topk=2)
        ids, state = found.token_ids[:, :, 1 if step == 0 else 0], found.state
        tokens.append(ids[:, 0])
        states.append(state[:, 0])
    verdict = problem.check(0, [*tokens, *states])
    assert not verdict.ok and not verdict.why and verdict.error > 0.001


def test_the_yardstick_of_fp8_takes_a_scale_a_head() -> None:
    """As draft_attention does: of one KV head 0.5, of the other 3."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 3, 4, 2, 64, generator=generator).to(torch.float8_e4m3fn).unbind()
    q, table = torch.randn(1, 1, 4, 64, generator=generator), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    lengths, scale = torch.tensor([11]), torch.tensor([0.5, 3.0])
    view = {"window_left": -1, "max_seq_len": 11}
    got = naive(q, k, v, table, lengths, 0.1, **view, k_scale=scale, v_scale=scale)
    plain = (k.float() * scale[:, None], v.float() * scale[:, None])
    torch.testing.assert_close(got, naive(q, *plain, table, lengths, 0.1, **view))


def test_a_head_in_centroid_order_has_the_same_candidates_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    normed, centroids, head = torch.randn(3, 16), torch.randn(4, 16), torch.randn(32, 16)
    ordering = torch.randperm(32)
    logits, ids = pytorch_candidates(normed, centroids, ordering, head, 2)
    of_ordered, same_ids = pytorch_candidates(normed, centroids, ordering, reorder_lm_head(head, ordering), 2, True)
    assert torch.equal(ids, same_ids)
    torch.testing.assert_close(of_ordered, logits)
