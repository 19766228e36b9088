"""CapturedDraft: draft() over static buffers gives what draft() gives, whatever lies in the rows behind the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import DEVICES, assert_same_bits
from torch import Tensor

from mtp_kernels import ArgumentError, AssistantWeights, CapturedDraft, DraftTree, KVView, draft

PAGES, PAGE = 6, 4
TYPES = (("sliding_attention", 7), ("full_attention", -1))


def views(weights: AssistantWeights, requests: int) -> dict[str, KVView]:
    """Caches for `requests`, and a table and lengths for as many."""
    made = {}
    generator = torch.Generator().manual_seed(5)
    for layer_type, window in TYPES:
        heads, dim = weights.config.kv_shape(layer_type)
        k, v = torch.randn(2, requests * PAGES, PAGE, heads, dim, generator=generator).to(weights.dtype).unbind()
        table = torch.randperm(requests * PAGES, generator=generator).int().view(requests, PAGES)
        lengths = torch.randint(0, PAGES * PAGE + 1, (requests,), generator=generator)
        moved = (t.to(weights.device) for t in (k, v, table, lengths))
        made[layer_type] = KVView.paged(*moved, window_left=window)
    return made


def seeds(weights: AssistantWeights, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """seed_ids, seed_state and positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(weights.vocab, (batch,), generator=generator)
    state = torch.randn(batch, weights.backbone, generator=generator).to(weights.dtype)
    positions = torch.randint(0, 24, (batch,), generator=generator)
    return ids.to(weights.device), state.to(weights.device), positions.to(weights.device)


def some(kv: dict[str, KVView], rows: slice, width: int = PAGES) -> dict[str, KVView]:
    return {
        name: replace(view, block_table=view.block_table[rows, :width], seq_lens=view.seq_lens[rows])
        for name, view in kv.items()
    }


def check_same(tree: DraftTree, expected: DraftTree) -> None:
    for name, one, two in zip(DraftTree._fields, tree, expected):
        if two is None:
            assert one is None, name
        elif one.is_floating_point():
            torch.testing.assert_close(one, two, msg=name)  # the reference's bits follow the batch, a kernel's do not
        else:
            assert_same_bits(one, two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", ["tiny", "tiny-dense"])
@pytest.mark.parametrize("topk", [1, 2])
def test_equals_draft(device: str, head: str, topk: int) -> None:
    """Batches that grow and shrink: what an earlier one left in the buffers decides nothing."""
    weights = AssistantWeights.synthetic(head, dtype=torch.float32).to(device)
    kv = views(weights, 5)
    runner = CapturedDraft(weights, kv, max_batch=5, num_steps=(3, 1), topk=topk, num_draft_tokens=2)
    for seed, (batch, depth) in enumerate([(5, 3), (1, 3), (3, 1), (0, 3), (2, 3), (4, 1)]):
        ids, state, positions = seeds(weights, batch, seed)
        mine = some(kv, slice(seed % (6 - batch), seed % (6 - batch) + batch))
        got = runner.draft(mine, ids, state, positions, positions + 1, depth)
        check_same(got, draft(weights, mine, ids, state, positions, depth, topk, 2, positions + 1))
        assert got.draft_ids.shape == (batch, 2)


def test_the_caller_may_fill_the_buffers() -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv = views(weights, 3)
    runner = CapturedDraft(weights, kv, max_batch=3, num_steps=2)
    ids, state, positions = seeds(weights, 3, 0)
    buffers = runner.buffers
    buffers.seed_ids[:], buffers.seed_state[:] = ids, state
    buffers.positions[:] = buffers.root_positions[:] = positions
    for name, view in kv.items():
        buffers.block_tables[name][:] = view.block_table
        buffers.seq_lens[name][:] = view.seq_lens
    check_same(runner.replay(3), draft(weights, kv, ids, state, positions, 2, root_positions=positions))


def test_a_narrower_table_bounds_the_lengths() -> None:
    """Pages that the buffer has of an earlier batch lie behind it."""
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv = views(weights, 2)
    runner = CapturedDraft(weights, kv, max_batch=2, num_steps=2)
    ids, state, positions = seeds(weights, 2, 0)
    runner.draft(kv, ids, state, positions, positions)
    narrow = some({name: view.with_seq_lens(torch.tensor([24, 24])) for name, view in kv.items()}, slice(0, 2), 3)
    got = runner.draft(narrow, ids, state, positions, positions)
    check_same(got, draft(weights, narrow, ids, state, positions, 2, root_positions=positions))


def test_without_root_positions() -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv = views(weights, 2)
    runner = CapturedDraft(weights, kv, max_batch=2, num_steps=2, root_positions=False)
    ids, state, positions = seeds(weights, 2, 0)
    got = runner.draft(kv, ids, state, positions)
    assert got.draft_positions is None
    check_same(got, draft(weights, kv, ids, state, positions, 2))


@pytest.mark.parametrize(("max_batch", "sizes"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))])
def test_buckets(max_batch: int, sizes: tuple[int, ...]) -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    assert CapturedDraft(weights, views(weights, 1), max_batch, num_steps=1).batch_sizes == sizes


def raises(message: str, call: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value) == message


def test_errors() -> None:
    weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    kv = views(weights, 2)
    ids, state, positions = seeds(weights, 2, 0)
    raises("CapturedDraft: max_batch: expected at least 1, got 0", lambda: CapturedDraft(weights, kv, 0))
    raises("CapturedDraft: num_steps: expected at least one number, got none",
           lambda: CapturedDraft(weights, kv, 1, num_steps=()))
    raises("draft: num_steps: expected at least 1, got 0", lambda: CapturedDraft(weights, kv, 1, num_steps=0))
    raises("draft: kv['full_attention']: expected a KVView for each layer type of the assistant, got views for "
           "['sliding_attention']", lambda: CapturedDraft(weights, {"sliding_attention": kv["sliding_attention"]}, 1))
    view = kv["full_attention"]
    flat = KVView.ragged(view.k_cache, view.v_cache, torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1]))
    raises("CapturedDraft: kv['full_attention']: expected a view with a block_table [batch, max_pages], got one with "
           "kv_indptr", lambda: CapturedDraft(weights, {**kv, "full_attention": flat}, 1))
    runner = CapturedDraft(weights, kv, 2, num_steps=(2, 3))
    raises("CapturedDraft: batch: expected 0 to 2, got 3 (max_batch)", lambda: runner.replay(3))
    raises("CapturedDraft: num_steps: expected one of [2, 3], got 4", lambda: runner.replay(1, 4))
    raises("CapturedDraft: root_positions: expected a tensor, got None (the runner was made with root_positions)",
           lambda: runner.draft(kv, ids, state, positions))
    raises("CapturedDraft: seed_state: expected [2, 40], got [2, 39] (the batch of seed_ids)",
           lambda: runner.draft(kv, ids, state[:, :39], positions, positions))
    raises("CapturedDraft: seed_state: expected float32, got float64 (that of the weights)",
           lambda: runner.draft(kv, ids, state.double(), positions, positions))
    raises("CapturedDraft: positions: expected [2], got [1] (the batch of seed_ids)",
           lambda: runner.draft(kv, ids, state, positions[:1], positions))
    other = {**kv, "full_attention": replace(view, k_cache=view.k_cache.clone())}
    raises("CapturedDraft: kv['full_attention']: expected a page table over the captured caches, got another cache",
           lambda: runner.draft(other, ids, state, positions, positions))
    wide = {**kv, "full_attention": replace(view, block_table=torch.zeros(2, 7, dtype=torch.int32))}
    raises("CapturedDraft: kv['full_attention'].block_table: expected 0 to 6, got 7 (its captured width)",
           lambda: runner.draft(wide, ids, state, positions, positions))
    raises("CapturedDraft: kv['full_attention']: expected a KVView for each layer type of the assistant, got views for "
           "['sliding_attention']",
           lambda: runner.draft({"sliding_attention": kv["sliding_attention"]}, ids, state, positions, positions))
