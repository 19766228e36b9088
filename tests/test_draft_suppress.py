"""draft() and CapturedDraft with suppress_ids."""

from __future__ import annotations

import pytest
import torch
from harness import DEVICES, assert_same_bits
from test_captured import check_same, seeds, views

from mtp_kernels import ArgumentError, AssistantWeights, CapturedDraft, draft


@pytest.mark.parametrize("head", ["tiny", "tiny-dense"])
@pytest.mark.parametrize("topk", [1, 3])
def test_never_drafted(head: str, topk: int) -> None:
    """What a draft would have had is left out of the next, again and again; an empty list changes no bit."""
    weights = AssistantWeights.synthetic(head, dtype=torch.float32)
    kv, (ids, state, positions) = views(weights, 5), seeds(weights, 5, seed=1)
    plain = draft(weights, kv, ids, state, positions, 3, topk, root_positions=positions)
    none = torch.empty(0, dtype=torch.int64)
    assert_same_bits(draft(weights, kv, ids, state, positions, 3, topk, None, positions, none).cand_ids, plain.cand_ids)
    suppress = torch.tensor([-1])
    for _ in range(2):
        suppress = torch.cat([suppress, plain.cand_ids.flatten().unique()[:5]])
        plain = draft(weights, kv, ids, state, positions, 3, topk, root_positions=positions, suppress_ids=suppress)
        assert not set(plain.cand_ids.flatten().tolist()) & set(suppress.tolist())


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_list_may_change(device: str) -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32, device=device)
    kv, (ids, state, positions) = views(weights, 3), seeds(weights, 3, seed=2)
    suppress = torch.full((4,), -1, device=device)
    runner = CapturedDraft(weights, kv, max_batch=4, num_steps=3, suppress_ids=suppress)
    first = runner.draft(kv, ids, state, positions, positions).draft_ids.clone()
    suppress[:2] = first[0, 1:3]
    second = runner.draft(kv, ids, state, positions, positions)
    check_same(second, draft(weights, kv, ids, state, positions, 3, root_positions=positions, suppress_ids=suppress))
    assert first[0, 1] not in second.draft_ids[:, 1:]


def test_errors() -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv, (ids, state, positions) = views(weights, 2), seeds(weights, 2, seed=3)
    for suppress, message in (
        (torch.zeros(2), "draft: suppress_ids: expected int32 or int64, got float32"),
        (torch.zeros(1, 2).long(), "draft: suppress_ids: expected 1 dimensions, got 2 ([1, 2])"),
        (torch.zeros(2, device="meta").long(), "draft: suppress_ids: expected cpu, got meta (weights is on cpu)"),
    ):
        with pytest.raises(ArgumentError) as error:
            draft(weights, kv, ids, state, positions, suppress_ids=suppress)
        assert str(error.value) == message
