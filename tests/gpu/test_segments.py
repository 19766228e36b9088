"""Segments: what lies between two attentions in one CUDA launch, and the head's candidates in another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from candidates_cases import KINDS, check_parts, head_problem
from harness import assert_same_bits
from mtp_kernels.bench.oracle import _exact_step, _in_fp64, check_steps
from segment_cases import SMALL, weights_of
from test_captured import seeds, some, views
from torch import Tensor

from mtp_kernels import AssistantWeights, CapturedDraft, KVView, _native, _segment, fused
from mtp_kernels.captured import choose_kernels, launch_round, new_workspace
from mtp_kernels.draft import chain_links

FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available() and (why := _segment._refuses_device(torch.device("cuda"), _segment.MOST_ROWS)):
    pytest.skip(why, allow_module_level=True)


def chain(
    weights: AssistantWeights, kv: dict[str, KVView], seed: tuple[Tensor, ...], num_steps: int, early: bool,
    workspace: Tensor | None
) -> list[Tensor]:
    ids, state, positions = seed
    drafter = fused.Drafter(weights, kv, positions, early, workspace=workspace)
    made = fused.draft_chain(drafter, ids, state, num_steps, None, positions + 1)
    assert made.draft_positions is not None
    return [made.draft_ids, made.draft_positions, made.cand_ids, made.cand_scores, *made.states]


@pytest.mark.parametrize("model", ["E2B", "E4B"])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 40, 64])
@pytest.mark.parametrize("context", [21, 700])
def test_against_fp64(model: str, rows: int, context: int) -> None:
    """Ids, scores and states of a chain, every token fed back to the references; one part of keys, and several."""
    from mtp_kernels.bench.case import Case
    from mtp_kernels.bench.run_steps import StepProblem

    weights = weights_of(model)
    case = Case("step", "step", model, batch=rows, context=context, num_steps=2)
    problem = StepProblem(case, torch.device("cuda"), weights)
    one = problem.inputs
    workspace = _segment.new_workspace(weights, rows)
    seed = (one.seed_ids, one.state, one.positions)
    draft_ids, draft_positions, cand_ids, scores, *states = chain(weights, one.kv, seed, 2, True, workspace)
    verdict = problem.check(0, [*cand_ids.unbind(1), *states])
    assert verdict.ok, verdict
    tree = chain_links(draft_ids, draft_positions - 1, cand_ids, scores)  # the oracle's root is at `positions`
    problem.case = replace(case, level="round")
    verdict = problem.check(0, tree)
    assert verdict.ok, verdict


def long_views(weights: AssistantWeights, lengths: list[int], page: int, kv_dtype: torch.dtype) -> dict[str, KVView]:
    """Pages in any order, NaN in all that no request may see, and a window."""
    found = {}
    width = max(1, -(-max(lengths) // page))
    generator = torch.Generator("cuda").manual_seed(7)
    for layer in weights.layers:
        if layer.layer_type in found:
            continue
        heads, dim = weights.config.kv_shape(layer.layer_type)
        table = torch.randperm(len(lengths) * width, generator=generator, device="cuda").int().view(-1, width)
        shape = (len(lengths) * width, page, heads, dim)
        k, v = (torch.randn(shape, generator=generator, device="cuda") * 0.05 for _ in range(2))
        window = 511 if layer.layer_type == "sliding_attention" else -1
        for row, length in enumerate(lengths):
            at = torch.arange(width * page, device="cuda")
            unseen = (at >= length) | (at < length - 1 - window if window >= 0 else at < 0)
            place = table[row].long().repeat_interleave(page) * page + at % page
            for cache in (k, v):
                cache.view(-1, heads, dim)[place[unseen]] = float("nan")
        k_scale = v_scale = None
        if kv_dtype == FP8:
            k_scale, v_scale = torch.tensor(0.003, device="cuda"), torch.tensor([0.003, 0.005], device="cuda")[:heads]
            k, v = k / k_scale, v / v_scale[:, None]
        seq_lens = torch.tensor(lengths, dtype=torch.int32 if page == 16 else torch.int64, device="cuda")
        found[layer.layer_type] = KVView.paged(
            k.to(kv_dtype), v.to(kv_dtype), table, seq_lens, window, k_scale, v_scale
        )
    return found


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("page", [1, 16, 61])
def test_lengths_around_chunks_and_folds(page: int, kv_dtype: torch.dtype) -> None:
    """Each row against fp64; no key but the visible ones is read."""
    weights = weights_of("small")
    lengths = [0, 1, 31, 33, 511, 512, 513, 2000, 4099]
    kv = long_views(weights, lengths, page, kv_dtype)
    ids, state, _ = seeds(weights, len(lengths), 3)
    positions = torch.tensor(lengths, device="cuda").clamp(min=1) - 1
    workspace = _segment.new_workspace(weights, len(lengths))
    got = chain(weights, kv, (ids, state, positions), 1, False, workspace)
    for i, length in enumerate(lengths):
        row = slice(i, i + 1)
        seed = (ids[row], state[row], positions[row])
        verdict = check_steps(weights, some(kv, row, 10**6), *seed, length, [got[2][row, 0]], [got[4][row]])
        assert verdict.ok, f"length {length}: {verdict}"


@pytest.mark.parametrize(("model", "most"), [("small", 64), ("E4B", 20), ("E2B", 8)])
def test_bits_follow_the_row_alone(model: str, most: int) -> None:
    """Of batches that run on other kernels; early or not."""
    weights = weights_of(model)
    kv, seed = views(weights, most), seeds(weights, most, 4)
    workspace = _segment.new_workspace(weights, most)
    alone = [chain(weights, some(kv, slice(i, i + 1)), tuple(s[i : i + 1] for s in seed), 2, True, workspace)
             for i in range(most)]
    for batch in (2, 3, 5, 8, 9, 17, 33, 64):
        for early in (False, True):
            if batch > most:
                continue
            got = chain(weights, some(kv, slice(0, batch)), tuple(s[:batch] for s in seed), 2, early, workspace)
            for i in range(batch):
                for name, (one, two) in enumerate(zip(got, alone[i])):
                    assert torch.equal(one[i : i + 1], two), f"result {name} of row {i} of {batch}, early {early}"


def test_bits_do_not_depend_on_who_folds_the_chunks() -> None:
    """Long requests alone leave chunks, many of them folds."""
    weights = weights_of("small")
    lengths = [4096, 700, 513, 2049] * 16
    kv = long_views(weights, lengths, 16, torch.bfloat16)
    seed = seeds(weights, 64, 4)
    workspace = _segment.new_workspace(weights, 64)
    together = chain(weights, kv, seed, 1, True, workspace)
    for i in range(4):
        one_row = slice(i, i + 1)
        own = some(kv, one_row, 256)
        alone = chain(weights, own, tuple(s[i : i + 1] for s in seed), 1, True, workspace)
        for one, two in zip(together, alone):
            assert torch.equal(one[i : i + 1], two)


@pytest.mark.parametrize("requests", [4, 2])
def test_rows_of_a_request_see_its_keys(requests: int) -> None:
    """Of a tree's frontier: three rows a request, which grow from any row of the step before."""
    weights = weights_of("small")
    lengths = [3, 600, 40, 2000][:requests]
    kv = long_views(weights, lengths, 16, torch.bfloat16)
    ids, state, _ = seeds(weights, 3 * requests, 3)
    source = {
        "token_ids": ids.view(-1, 3),
        "row_index": torch.tensor([[2, 0, 1], [1, -7, 2], [0, 0, 9], [1, 2, 0]], device="cuda")[:requests],
    }
    positions = torch.tensor(lengths, device="cuda") - 1
    states = state.view(requests, 3, -1)
    found = []
    for workspace in (None, _segment.new_workspace(weights, 3 * requests)):
        drafter = fused.Drafter(weights, kv, positions, True, workspace=workspace)
        found.append(fused._step(drafter, requests, 3, states, source, depth=3)[1])
    grown = torch.take_along_dim(states, source["row_index"].clamp(0, 2).unsqueeze(-1), 1)
    exact_kv = {name: _in_fp64(view) for name, view in kv.items()}
    _, exact = _exact_step(weights, exact_kv, source["token_ids"], grown.double(), positions)
    plain, ours = (torch.linalg.vector_norm(one.double() - exact, dim=-1) for one in found)
    assert (ours <= 2 * plain).all(), f"{ours} from fp64, Triton's kernels {plain}"


def test_tokens_without_an_embedding() -> None:
    """Tokens outside the vocabulary are rows of zeros, whoever looks them up."""
    weights = weights_of("small")
    kv, (_, state, positions) = views(weights, 3), seeds(weights, 3, 3)
    ids = torch.tensor([-1, weights.vocab, 2**40], device="cuda")
    workspace = _segment.new_workspace(weights, 3)
    got = chain(weights, kv, (ids, state, positions), 1, True, workspace)
    without = replace(weights, embed_weight=torch.zeros_like(weights.embed_weight))
    expected = chain(without, kv, (torch.zeros_like(ids), state, positions), 1, True, workspace)
    for one, two in zip(got[2:], expected[2:]):  # behind the drafts, which hold the seeds
        assert_same_bits(one, two)


@pytest.mark.parametrize("length", [0, 1, 31, 32])
def test_the_width_of_the_table_changes_no_bit(length: int) -> None:
    """Of two pages, where attention leaves its result, and of 256, where it leaves parts."""
    weights = weights_of("small")
    kv, seed = long_views(weights, [length, 4096], 16, torch.bfloat16), seeds(weights, 1, 4)
    workspace = _segment.new_workspace(weights, 1)
    wide, narrow = (
        chain(weights, some(kv, slice(0, 1), width), seed, 1, True, workspace) for width in (256, 2)
    )
    for one, two in zip(wide, narrow):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("topk", "most"), [(1, 9), (3, 9), (1, 8), (2, 4)])
def test_captured_equals_eager(topk: int, most: int) -> None:
    """Replays, also after memory was freed and filled again, as batches shrink and grow; a hundred of them equal."""
    weights = weights_of("small")
    kv = views(weights, most)
    runner = CapturedDraft(weights, kv, max_batch=most, num_steps=(3, 1), topk=topk)
    assert (runner.kernels, runner.reason) == ("segments", "")
    for turn, (batch, depth) in enumerate([(most, 3), (1, 3), (3, 1), (most - 1, 3), (0, 1), (2, 1)] * 3):
        ids, state, positions = seeds(weights, batch, turn)
        mine = some(kv, slice(0, batch))
        waste = torch.full((1 << 20,), float("nan"), device="cuda")
        tree = runner.draft(mine, ids, state, positions, positions + 1, depth)
        got = [None if t is None else t.clone() for t in tree]
        del waste
        workspace = new_workspace("segments", weights, most * topk)
        expected = launch_round(
            "segments", weights, mine, ids, state, positions, depth, topk, None, positions + 1, None, workspace
        )()
        for one, two in zip(got, expected):
            assert_same_bits(one, two)
    ids, state, positions = seeds(weights, 4, 1)
    first = [t.clone() for t in runner.draft(some(kv, slice(0, 4)), ids, state, positions, positions + 1)]
    for _ in range(100):
        for one, two in zip(first, runner.replay(4)):
            assert_same_bits(one, two)


def test_no_synchronisation() -> None:
    weights = weights_of("small")
    kv = views(weights, 4)
    runner = CapturedDraft(weights, kv, max_batch=4)
    ids, state, positions = seeds(weights, 4, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.draft(kv, ids, state, positions, positions + 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_launches_are_counted_beyond_32_bits() -> None:
    weights = weights_of("small")
    kv, seed = views(weights, 2), seeds(weights, 2, 4)
    workspace = _segment.new_workspace(weights, 2)
    expected = chain(weights, kv, seed, 1, True, workspace)
    workspace.zero_()
    workspace.view(torch.int32)[0] = -3
    for _ in range(3):
        for one, two in zip(chain(weights, kv, seed, 1, True, workspace), expected):
            assert torch.equal(one, two)
    assert workspace.view(torch.int32)[0] == -3 + 3 * weights.num_layers + 1  # 0 is left out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows,ordered", [(1, False), (9, True), (64, False)])
def test_candidates(kind: str, rows: int, ordered: bool) -> None:
    given, out = head_problem(kind, rows, torch.int32 if rows == 1 else torch.int64, "cuda")
    _native.cuda_op("candidates")(**given, centroid_ordered=ordered, **out, early=False)
    check_parts(kind, given, out, ordered)


def test_what_is_refused() -> None:
    weights = weights_of("small")
    kv = views(weights, 2)
    assert choose_kernels(weights, kv, 1, max_batch=64) == ("segments", "")
    assert choose_kernels(weights, kv, 1, max_batch=65)[0] == "fused"
    assert choose_kernels(weights, kv, 9, max_batch=8)[0] == "fused"
    assert _segment.refuses(weights, kv, 65) == "65 rows are more than 64"
    half = AssistantWeights.synthetic(SMALL, dtype=torch.float16, device="cuda")
    assert _segment.refuses(half, kv, 1) == "post_projection of torch.float16"
    seed = seeds(weights, 2, 1)
    with pytest.raises(RuntimeError, match="workspace is not"):
        chain(weights, kv, seed, 1, True, _segment.new_workspace(weights, 1))
