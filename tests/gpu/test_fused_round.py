"""What only a GPU shows of a round's private kernels: bits, kernels that start early, and replays."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits
from test_captured import seeds, some, views
from test_fused import chain, weights_of

from mtp_kernels import AssistantWeights, CapturedDraft
from mtp_kernels.captured import launch_round

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("model", ["tiny", "E4B"])
def test_bits_follow_the_row_alone(model: str) -> None:
    """Of batches whose kernels have other tiles, other warps and other launches; early or not."""
    weights = weights_of("cuda", torch.bfloat16)
    if model != "tiny":
        weights = AssistantWeights.synthetic(model, device="cuda")
    kv, seed = views(weights, 40), seeds(weights, 40, 4)
    expected = [chain(weights, some(kv, slice(i, i + 1)), tuple(s[i : i + 1] for s in seed), 3) for i in range(40)]
    for batch in (2, 3, 8, 9, 17, 40):
        for early in (False, True):
            got = chain(weights, some(kv, slice(0, batch)), tuple(s[:batch] for s in seed), 3, early)
            for i in range(batch):
                for name, (one, two) in enumerate(zip(got, expected[i])):
                    assert torch.equal(one[i : i + 1], two), f"result {name} of row {i} of {batch}, early {early}"


@pytest.mark.parametrize("topk", [1, 2])
def test_captured_equals_eager(topk: int) -> None:
    """Replays, also after memory was freed and filled again, and as batches shrink and grow."""
    weights = weights_of("cuda", torch.bfloat16)
    kv = views(weights, 5)
    runner = CapturedDraft(weights, kv, max_batch=5, num_steps=(3, 1), topk=topk)
    assert runner.kernels == "fused"
    for turn, (batch, depth) in enumerate([(5, 3), (1, 3), (3, 1), (4, 3), (2, 1)] * 3):
        ids, state, positions = seeds(weights, batch, turn)
        mine = some(kv, slice(0, batch))
        waste = torch.full((1 << 20,), float("nan"), device="cuda")
        got = runner.draft(mine, ids, state, positions, positions + 1, depth)
        got = [None if t is None else t.clone() for t in got]
        del waste
        expected = launch_round("fused", weights, mine, ids, state, positions, depth, topk, None, positions + 1)()
        for one, two in zip(got, expected):
            assert_same_bits(one, two)
