"""The trained pair on a GPU: the CPU reference's drafts, and captured rounds that equal eager ones whatever lies about.

Seeds and KV come from the target on the CPU, in fp32, so that both devices draft from the same bits.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generation_cases import trained_pair, unequal_prompts
from harness import assert_same_bits, forced
from mtp_kernels.bench.oracle import check_round
from torch import Tensor

from mtp_kernels import AssistantWeights, CapturedDraft, DraftTree, KVView, draft
from mtp_kernels.captured import launch_round
from mtp_kernels.demo.pair import HEADS
from mtp_kernels.generation._target import Target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = "cuda"
LENGTHS = (1, 63, 66, 200)  # of prompts; the pair's window is 64
STEPS = 4
SHAPES = [(1, None), (4, 16)]  # topk, nodes
PRIVATE = "fused"  # what CapturedDraft runs there in 16 bits
BATCH = 8

Seeds = tuple[dict[str, KVView], Tensor, Tensor, Tensor]  # KV, seed_ids, seed_state, positions
shapes = pytest.mark.parametrize(("topk", "nodes"), SHAPES, ids=["chain", "tree"])
heads = pytest.mark.parametrize("head", HEADS)


@functools.cache
def seeds_of(head: str, length: int | None) -> Seeds:
    """After a prompt of every held-out module, all of a length or of unequal ones: on the CPU, in fp32."""
    pair = trained_pair(head)
    prompts = unequal_prompts(pair) if length is None else [pair.held_out_prompt(m, length) for m in pair.held_out]
    target, requests = Target(pair.model), range(len(prompts))
    target.open_cache([p.numel() for p in prompts], page_size=16)
    logits, hidden = target.prefill(requests, prompts)
    kv = target.kv(requests, [layer.layer_type for layer in pair.weights.layers])
    return kv, logits.argmax(-1), hidden, torch.tensor([p.numel() for p in prompts])


def on(device: str, dtype: torch.dtype, head: str, length: int | None) -> tuple[AssistantWeights, Seeds]:
    """The same weights, KV and seeds, rounded to `dtype`, there."""
    kv, ids, state, positions = seeds_of(head, length)
    moved = {
        name: replace(view, k_cache=view.k_cache.to(device, dtype), v_cache=view.v_cache.to(device, dtype),
                      block_table=view.block_table.to(device), seq_lens=view.seq_lens.to(device))
        for name, view in kv.items()
    }
    weights = trained_pair(head).weights.to(device=device, dtype=dtype)
    return weights, (moved, ids.to(device), state.to(device, dtype), positions.to(device))


def first(seeds: Seeds, batch: int) -> Seeds:
    kv, *others = seeds
    views = {n: replace(v, block_table=v.block_table[:batch], seq_lens=v.seq_lens[:batch]) for n, v in kv.items()}
    ids, state, positions = (t[:batch] for t in others)
    return views, ids, state, positions


def eager(weights: AssistantWeights, seeds: Seeds, topk: int, nodes: int | None) -> DraftTree:
    return draft(weights, *seeds, STEPS, topk, nodes, root_positions=seeds[3])


def private(weights: AssistantWeights, seeds: Seeds, topk: int, nodes: int | None) -> DraftTree:
    """The kernels that a captured round has, each launched from here."""
    return launch_round(PRIVATE, weights, *seeds, STEPS, topk, nodes, seeds[3])()


def most_private(head: str, topk: int) -> int:
    """Requests that the private kernels serve."""
    return BATCH if head == "centroid" else 8 // topk


def captured(
    weights: AssistantWeights, seeds: Seeds, topk: int, nodes: int | None, is_private: bool, most: int = BATCH
) -> CapturedDraft:
    runner = CapturedDraft(weights, first(seeds, most)[0], most, STEPS, topk, nodes, private=is_private)
    assert runner.kernels == (PRIVATE if is_private else "ops"), runner.reason
    return runner


def run(runner: CapturedDraft, seeds: Seeds) -> DraftTree:
    kv, ids, state, positions = seeds
    return runner.draft(kv, ids, state, positions, positions)


def check_bits(one: DraftTree, two: DraftTree) -> None:
    for a, b in zip(one, two):
        assert_same_bits(a, b)


def copied(tree: DraftTree) -> DraftTree:
    return DraftTree._make(None if t is None else t.clone() for t in tree)


@heads
@shapes
@pytest.mark.parametrize("length", LENGTHS)
def test_fp32_drafts_are_those_of_the_cpu_reference(head: str, topk: int, nodes: int | None, length: int) -> None:
    got = eager(*on(DEVICE, torch.float32, head, length), topk, nodes)
    with forced("reference"):
        expected = eager(*on("cpu", torch.float32, head, length), topk, nodes)
    for name, one, two in zip(DraftTree._fields, got, expected):
        if two.is_floating_point():
            torch.testing.assert_close(one.cpu(), two, rtol=1e-4, atol=1e-4, msg=name)
        else:
            assert torch.equal(one.cpu(), two), name


@heads
@shapes
@pytest.mark.parametrize("length", LENGTHS)
def test_bf16_drafts_differ_by_rounding_alone(head: str, topk: int, nodes: int | None, length: int) -> None:
    """Two right drafts may differ in bf16: each candidate must be the best in fp64 but for twice plain bf16's error."""
    weights, seeds = on(DEVICE, torch.bfloat16, head, length)
    few = first(seeds, most_private(head, topk))
    rounds = [(seeds, eager(weights, seeds, topk, nodes)), (few, private(weights, few, topk, nodes))]
    for (kv, ids, state, positions), tree in rounds:
        size = tree.draft_ids.size(1)
        verdict = check_round(weights, kv, ids, state, positions, length, tree, STEPS, topk, size)
        assert verdict.ok, verdict


@heads
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_ops_equal_draft(head: str, topk: int, nodes: int | None, dtype: torch.dtype) -> None:
    weights, seeds = on(DEVICE, dtype, head, None)
    check_shrinking(captured(weights, seeds, topk, nodes, False), weights, seeds, eager)


@heads
@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_captured_private_kernels_equal_eager_ones(head: str, topk: int, nodes: int | None, dtype: torch.dtype) -> None:
    weights, seeds = on(DEVICE, dtype, head, None)
    most = most_private(head, topk)
    check_shrinking(captured(weights, seeds, topk, nodes, True, most), weights, seeds, private)


def check_shrinking(
    runner: CapturedDraft, weights: AssistantWeights, seeds: Seeds, expected: Callable[..., DraftTree]
) -> None:
    """Batches that shrink to 0, and a full one again: what lies behind it, and was there before, decides no bit."""
    most = runner.max_batch
    for batch in (most, *(size for size in (5, 3, 1, 0) if size < most), most):
        poison(runner)
        mine = first(seeds, batch)
        got = copied(run(runner, mine))
        check_bits(got, expected(weights, mine, runner.topk, runner.num_draft_tokens))
        assert not got.cand_scores.isnan().any()


def poison(runner: CapturedDraft) -> None:
    """Every row of the buffers, as if other requests had left it."""
    buffers = runner.buffers
    buffers.seed_ids.fill_(2**40)
    buffers.seed_state.fill_(torch.nan)
    buffers.positions.fill_(-(2**31))
    buffers.root_positions.fill_(-(2**31))
    for table in buffers.block_tables.values():
        table.fill_(2**31 - 1)
    for lengths in buffers.seq_lens.values():
        lengths.fill_(2**31 - 1)


@shapes
@pytest.mark.parametrize("is_private", [False, True])
def test_a_hundred_replays_are_equal_whatever_becomes_of_free_memory(
    topk: int, nodes: int | None, is_private: bool
) -> None:
    weights, seeds = on(DEVICE, torch.bfloat16, "centroid", None)
    mine = first(seeds, 5)
    runner = captured(weights, seeds, topk, nodes, is_private)
    expected = copied(run(runner, mine))
    for number in range(100):
        if number % 10 == 0:
            gc.collect()
            torch.cuda.empty_cache()
            torch.full((1 << 28,), torch.nan, device=DEVICE)  # 1 GiB, freed at once
        junk = [torch.full((1 << (8 + (number + i) % 14),), torch.nan, device=DEVICE) for i in range(16)]
        del junk
        check_bits(runner.replay(5), expected)


@shapes
@pytest.mark.parametrize("kernels", ["draft()", "captured ops", "captured private"])
def test_a_whole_round_never_synchronises(topk: int, nodes: int | None, kernels: str) -> None:
    """From the seeds to the next round's seeds."""
    weights, seeds = on(DEVICE, torch.bfloat16, "centroid", None)
    mine = first(seeds, 5)
    runner = None if kernels == "draft()" else captured(weights, seeds, topk, nodes, kernels == "captured private")
    hidden = torch.randn(BATCH * 64, weights.backbone, device=DEVICE).to(torch.bfloat16)

    def whole_round() -> tuple[Tensor, ...]:
        tree = eager(weights, mine, topk, nodes) if runner is None else run(runner, mine)
        links = (tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling)
        chosen = tree.draft_ids.roll(-1, 1).flatten()  # a target that agrees with some of the draft
        accepted = torch.ops.mtp.verify_greedy(tree.draft_ids, *links, chosen, STEPS)
        return torch.ops.mtp.commit(*accepted, hidden)

    before = [t.clone() for t in whole_round()]  # kernels compile
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = whole_round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, two in zip(before, after):
        assert_same_bits(one, two)
