"""CapturedDraft on a GPU, on the ops: the bits of the eager round, in any bucket, replayed, refilled, never synced."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits
from test_captured import seeds, some, views

from mtp_kernels import AssistantWeights, CapturedDraft, DraftTree, draft

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.float32, torch.bfloat16]


def made(head: str, dtype: torch.dtype, topk: int, max_batch: int = 6) -> tuple[AssistantWeights, dict, CapturedDraft]:
    weights = AssistantWeights.synthetic(head, dtype=dtype, device="cuda")
    kv = views(weights, max_batch)
    return weights, kv, CapturedDraft(weights, kv, max_batch, num_steps=3, topk=topk, private=False)


def check_bits(one: DraftTree, two: DraftTree) -> None:
    for a, b in zip(one, two):
        assert_same_bits(a, b)


@pytest.mark.parametrize("head", ["tiny", "tiny-dense"])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_equals_eager_in_every_bucket(head: str, topk: int, dtype: torch.dtype) -> None:
    """A batch of 3 runs in a bucket of 4, one of 5 in one of 6: the padded rows decide no bit."""
    weights, kv, runner = made(head, dtype, topk)
    for seed, batch in enumerate([6, 5, 3, 2, 1, 0, 4]):
        ids, state, positions = seeds(weights, batch, seed)
        mine = some(kv, slice(0, batch))
        got = runner.draft(mine, ids, state, positions, positions)
        check_bits(got, draft(weights, mine, ids, state, positions, 3, topk, None, positions))


@pytest.mark.parametrize("topk", [1, 2])
def test_a_hundred_replays_are_equal_with_memory_freed_and_refilled(topk: int) -> None:
    weights, kv, runner = made("tiny", torch.bfloat16, topk)
    ids, state, positions = seeds(weights, 5, 0)
    mine = some(kv, slice(0, 5))
    first = DraftTree._make(t.clone() for t in runner.draft(mine, ids, state, positions, positions))
    for number in range(100):
        junk = [torch.full((1 << (10 + number % 12),), 1e30, device="cuda") for _ in range(8)]
        del junk
        if number % 10 == 0:
            torch.cuda.empty_cache()
            runner.draft(some(kv, slice(0, 2)), ids[:2], state[:2], positions[:2], positions[:2])
            runner.draft(mine, ids, state, positions, positions)
        check_bits(runner.replay(5), first)


@pytest.mark.parametrize("topk", [1, 2])
def test_no_synchronisation(topk: int) -> None:
    weights, kv, runner = made("tiny", torch.bfloat16, topk)
    ids, state, positions = seeds(weights, 3, 0)
    mine = some(kv, slice(0, 3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.draft(mine, ids, state, positions, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
