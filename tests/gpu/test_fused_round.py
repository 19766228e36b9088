"""What only a GPU shows of a round's private kernels: bits, kernels that start early, and replays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import assert_same_bits
from test_captured import seeds, some, views
from test_fused import chain, weights_of
from torch import Tensor

from mtp_kernels import AssistantWeights, CapturedDraft
from mtp_kernels.captured import launch_round

pytest.importorskip("triton")

from mtp_kernels.fused import Drafter, draft_chain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("model", ["centroids", "E4B", "dense", "31B"])
def test_bits_follow_the_row_alone(model: str) -> None:
    """Of batches whose kernels have other tiles, other warps and other launches; early or not."""
    if model in ("centroids", "dense"):
        weights = weights_of("cuda", torch.bfloat16, model)
    else:
        weights = AssistantWeights.synthetic(model, device="cuda")
    batches = (2, 3, 8, 9, 17, 40) if weights.centroids is not None else (1, 2, 3, 4, 8)
    most = max(batches)
    kv, seed = views(weights, most), seeds(weights, most, 4)
    expected = [chain(weights, some(kv, slice(i, i + 1)), tuple(s[i : i + 1] for s in seed), 3) for i in range(most)]
    for batch in batches:
        for early in (False, True):
            got = chain(weights, some(kv, slice(0, batch)), tuple(s[:batch] for s in seed), 3, early)
            for i in range(batch):
                for name, (one, two) in enumerate(zip(got, expected[i])):
                    assert torch.equal(one[i : i + 1], two), f"result {name} of row {i} of {batch}, early {early}"


def test_where_weights_lie_changes_no_bit() -> None:
    """31B's sizes, and weights that lie askew, in rows apart, so that nothing can be asked for ahead."""
    weights = AssistantWeights.synthetic("31B", device="cuda")
    kv, (ids, state, positions) = views(weights, 3), seeds(weights, 3, 8)
    layers = [
        replace(layer, o_proj=askew(layer.o_proj, 1), gate_up=askew(layer.gate_up, 8), down=askew(layer.down, 0))
        for layer in weights.layers
    ]
    expected: list[Tensor] = []
    for model in (weights, replace(weights, layers=tuple(layers), lm_head=askew(weights.lm_head, 1))):
        for early in (False, True):
            made = draft_chain(Drafter(model, kv, positions, early), ids, state, 3, None, positions)
            got = [made.draft_ids, made.cand_ids, made.cand_scores, *made.states]
            expected = expected or got
            for one, two in zip(got, expected):
                assert_same_bits(one, two)


def askew(matrix: Tensor, apart: int) -> Tensor:
    """The same values behind one element more, in rows further `apart`."""
    rows, columns = matrix.shape
    memory = matrix.new_zeros(1 + rows * (columns + apart))
    moved = memory[1:].view(rows, columns + apart)[:, :columns]
    return moved.copy_(matrix)


@pytest.mark.parametrize("head", ["centroids", "dense"])
@pytest.mark.parametrize("topk", [1, 2])
def test_captured_equals_eager(head: str, topk: int) -> None:
    """Replays, also after memory was freed and filled again, and as batches shrink and grow."""
    weights = weights_of("cuda", torch.bfloat16, head)
    most = 5 if head == "centroids" else 8 // topk
    kv = views(weights, most)
    runner = CapturedDraft(weights, kv, max_batch=most, num_steps=(3, 1), topk=topk)
    assert runner.kernels == "fused"
    for turn, (batch, depth) in enumerate([(most, 3), (1, 3), (min(3, most), 1), (most - 1, 3), (2, 1)] * 3):
        ids, state, positions = seeds(weights, batch, turn)
        mine = some(kv, slice(0, batch))
        waste = torch.full((1 << 20,), float("nan"), device="cuda")
        got = runner.draft(mine, ids, state, positions, positions + 1, depth)
        got = [None if t is None else t.clone() for t in got]
        del waste
        expected = launch_round("fused", weights, mine, ids, state, positions, depth, topk, None, positions + 1)()
        for one, two in zip(got, expected):
            assert_same_bits(one, two)
