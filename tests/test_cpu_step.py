"""The CPU library's whole step: the bits of the public ops one by one, whatever the batch and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from harness import assert_same_bits, debug, forced
from test_captured import seeds, views
from torch import Tensor

from mtp_kernels import AssistantWeights, CapturedDraft, KVView, _cpu_step, _native, captured, draft
from mtp_kernels._cpu_step import cpu_chain, cpu_step, why_no_step
from mtp_kernels.draft import draft_step

if why := _native.cpu_library():
    pytest.skip(why, allow_module_level=True)

VOCAB = 4096  # of the large size's head, to be quick
LAYERS, VIEWS, NUMBERS, TOPK, STEPS = 15, 18, 19, 20, 21  # arguments of mtp_cpu::draft_step
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = list(product(["tiny", "tiny-dense", "E2B"], DTYPES, [1, 2, 5]))
Case = tuple[AssistantWeights, dict[str, KVView], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=CASES, ids=["-".join(map(str, case)) for case in CASES])
def case(threads: None, request: pytest.FixtureRequest) -> Case:
    """(weights, target's cache, seeds) of a batch of 3, on a number of threads."""
    head, dtype, num_threads = request.param
    torch.set_num_threads(num_threads)
    weights = AssistantWeights.synthetic(head, dtype=dtype, vocab=VOCAB if head == "E2B" else None)
    return weights, views(weights, 3), seeds(weights, 3, 0)


def step_of(weights: AssistantWeights, kv: dict[str, KVView], requests: slice = slice(None)) -> Any:
    """What the whole step gives for these requests of a batch of 4."""
    ids, state, positions = (t[requests] for t in seeds(weights, 4, 1))
    chosen = {name: replace(v, block_table=v.block_table[requests], seq_lens=v.seq_lens[requests])
              for name, v in kv.items()}
    return cpu_step(weights, chosen)(ids.unsqueeze(1), state.unsqueeze(1), positions, None, 2)


def check_same(weights: AssistantWeights, kv: dict[str, KVView], ids: Tensor, state: Tensor, positions: Tensor,
               row_index: Tensor | None = None, topk: int = 1) -> None:
    expected = draft_step(weights, kv, ids, state, positions, row_index=row_index, topk=topk)
    got = cpu_step(weights, kv)(ids, state, positions, row_index, topk)
    for one, two in zip(got, expected):
        assert_same_bits(one, two)


def test_has_the_bits_of_the_ops(case: Case) -> None:
    weights, kv, (ids, state, positions) = case
    check_same(weights, kv, ids.unsqueeze(1), state.unsqueeze(1), positions)
    two = torch.stack([ids, ids.flip(0)], 1)  # both rows of a request grow from its last row of state, or its first
    states = torch.stack([state, state.flip(0)], 1)
    check_same(weights, kv, two, states, positions, torch.tensor([[1, 0], [1, 1], [0, 0]]), 2)


def test_a_chain_has_the_bits_of_its_steps(case: Case) -> None:
    weights, kv, (ids, state, positions) = case
    found = cpu_chain(weights, kv)(ids, state, positions, 4)
    for logprobs, token_ids, next_state in zip(*found):
        expected = draft_step(weights, kv, ids.unsqueeze(1), state.unsqueeze(1), positions)
        assert_same_bits(logprobs, expected.logprobs[:, 0, 0])
        assert_same_bits(token_ids, expected.token_ids[:, 0, 0])
        assert_same_bits(next_state, expected.state[:, 0])
        ids, state = expected.token_ids[:, 0, 0], expected.state[:, 0]


@pytest.mark.parametrize("head", ["tiny", "E2B"])
def test_neither_threads_nor_neighbours_change_a_bit(head: str) -> None:
    weights = AssistantWeights.synthetic(head, dtype=torch.bfloat16, vocab=VOCAB if head == "E2B" else None)
    kv = views(weights, 4)
    torch.set_num_threads(1)
    expected = step_of(weights, kv)
    for num_threads in (2, 7):
        torch.set_num_threads(num_threads)
        for b in range(4):
            for alone, together in zip(step_of(weights, kv, slice(b, b + 1)), expected):
                assert_same_bits(alone, together[b : b + 1])


@pytest.mark.parametrize("kind", ["dense", "ragged", "fp8"])
def test_every_kind_of_cache(kind: str) -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.bfloat16)
    kv = {name: KINDS[kind](view) for name, view in views(weights, 3).items()}
    ids, state, positions = seeds(weights, 3, 2)
    check_same(weights, kv, ids.unsqueeze(1), state.unsqueeze(1), positions)


def dense(view: KVView) -> KVView:
    k, v = (cache[view.block_table.long()].flatten(1, 2).transpose(1, 2) for cache in (view.k_cache, view.v_cache))
    return KVView.dense(k, v, view.seq_lens, view.window_left)


def ragged(view: KVView) -> KVView:
    indptr = torch.arange(view.batch + 1) * view.block_table.size(1)
    return KVView.ragged(view.k_cache, view.v_cache, indptr, view.block_table.flatten(), view.seq_lens,
                         window_left=view.window_left)


def fp8(view: KVView) -> KVView:
    k, v = (cache.to(torch.float8_e4m3fn) for cache in (view.k_cache, view.v_cache))
    scale = torch.tensor([0.5])
    return KVView.paged(k, v, view.block_table, view.seq_lens, view.window_left, scale, scale * 3)


KINDS = {"dense": dense, "ragged": ragged, "fp8": fp8}


def test_no_requests() -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv = {name: replace(v, block_table=v.block_table[:0], seq_lens=v.seq_lens[:0])
          for name, v in views(weights, 1).items()}
    ids, state, positions = seeds(weights, 0, 0)
    logprobs, token_ids, next_state = cpu_step(weights, kv)(ids.unsqueeze(1), state.unsqueeze(1), positions, None, 3)
    assert logprobs.shape == token_ids.shape == (0, 1, 3) and next_state.shape == (0, 1, weights.backbone)
    logprobs, token_ids, states = cpu_chain(weights, kv)(ids, state, positions, 2)
    assert logprobs.shape == token_ids.shape == (2, 0) and states.shape == (2, 0, weights.backbone)


@pytest.mark.parametrize("topk", [1, 2])
def test_captured_draft_runs_it_unless_told_otherwise(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any) -> Any:
        run = make(*args)
        return lambda *inputs: calls.append(1) or run(*inputs)

    name, make, each_round = ("cpu_chain", cpu_chain, 1) if topk == 1 else ("cpu_step", cpu_step, 3)
    monkeypatch.setattr(captured, name, counted)
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv = views(weights, 2)
    ids, state, positions = seeds(weights, 2, 0)
    runner = CapturedDraft(weights, kv, max_batch=2, num_steps=3, topk=topk)
    expected = draft(weights, kv, ids, state, positions, 3, topk, None, positions)
    for context, number in (
        (forced("cpu"), each_round), (forced("reference"), 0), (debug(), 0), (forced(None), each_round),
    ):  # fmt: skip
        calls.clear()
        with context:
            tree = runner.draft(kv, ids, state, positions, positions)
        assert len(calls) == number
        assert_same_bits(tree.draft_ids, expected.draft_ids)


def test_why_no_step() -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    assert why_no_step(weights) == ""
    assert why_no_step(weights.to("meta")) == "the weights are not on a CPU"
    with forced("triton"):
        assert why_no_step(weights) == "MTP_FORCE_IMPL asks for other kernels"
    with debug():
        assert why_no_step(weights) == "MTP_DEBUG checks the arguments of every op"


def test_lists_of_other_lengths_are_refused() -> None:
    """The launcher indexes these lists by what _cpu_step.py says of them."""
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv = views(weights, 1)
    ids, state, positions = seeds(weights, 1, 0)
    op = _native.cpu_op("draft_step")
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cpu_step._native, "cpu_op", lambda name: lambda *args: seen.append(args) or op(*args))
        cpu_step(weights, kv)(ids.unsqueeze(1), state.unsqueeze(1), positions, None, 1)
    good = list(seen[0])
    for place, message in ((LAYERS, "lists of the layers"), (VIEWS, "has no view"), (NUMBERS, "has no view")):
        wrong = [*good]
        wrong[place] = good[place][:-1]
        with pytest.raises(RuntimeError, match=message):
            op(*wrong)
    for topk, num_steps in ((2, 2), (1, 0), (1, -1)):
        wrong = [*good]
        wrong[TOPK], wrong[STEPS] = topk, num_steps
        with pytest.raises(RuntimeError, match="only a chain has several steps"):
            op(*wrong)
