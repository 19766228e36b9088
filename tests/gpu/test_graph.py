"""A whole round on a GPU: no device-to-host copy, and the same bits when captured, replayed and refilled."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_bits

from mtp_kernels import AssistantWeights, KVView, draft

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ops = torch.ops.mtp
BATCH, PAGES, PAGE = 3, 6, 4


class Round:
    """Static inputs of a round, refilled in place."""

    def __init__(self, head: str, dtype: torch.dtype) -> None:
        self.weights = AssistantWeights.synthetic(head, dtype=dtype, device="cuda")
        self.ids = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
        self.state = torch.zeros(BATCH, self.weights.backbone, dtype=dtype, device="cuda")
        self.lengths = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
        self.tables = [torch.zeros(BATCH, PAGES, dtype=torch.int32, device="cuda") for _ in range(2)]
        self.kv = {}
        for table, (layer_type, window) in zip(self.tables, (("sliding_attention", 7), ("full_attention", -1))):
            heads, dim = self.weights.config.kv_shape(layer_type)
            k, v = torch.randn(2, BATCH * PAGES, PAGE, heads, dim, device="cuda").to(dtype).unbind()
            self.kv[layer_type] = KVView.paged(k, v, table, self.lengths, window_left=window)
        self.target_hidden = torch.randn(BATCH * 64, self.weights.backbone, device="cuda").to(dtype)

    def refill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids.copy_(torch.randint(self.weights.vocab, (BATCH,), generator=generator))
        self.state.copy_(torch.randn(self.state.shape, generator=generator))
        self.lengths.copy_(torch.randint(0, PAGES * PAGE + 1, (BATCH,), generator=generator))
        for table in self.tables:
            table.copy_(torch.randperm(BATCH * PAGES, generator=generator).view(BATCH, PAGES))

    def run(self, topk: int) -> tuple[torch.Tensor, ...]:
        tree = draft(self.weights, self.kv, self.ids, self.state, self.lengths, 3, topk, None, self.lengths)
        target_ids = (tree.draft_ids + (tree.draft_ids % 2)).flatten()
        accepted = ops.verify_greedy(
            tree.draft_ids, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling, target_ids, 3
        )
        return (*tree, *accepted, *ops.commit(*accepted, self.target_hidden))


@pytest.mark.parametrize("head", ["tiny", "tiny-dense"])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_equals_eager(head: str, topk: int, dtype: torch.dtype) -> None:
    one = Round(head, dtype)
    one.refill(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one.run(topk)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one.run(topk)
    for seed in range(20):
        one.refill(seed)
        eager = one.run(topk)
        graph.replay()
        for a, b in zip(captured, eager):
            assert_same_bits(a, b)


@pytest.mark.parametrize("topk", [1, 2])
def test_no_synchronisation_in_a_round(topk: int) -> None:
    one = Round("tiny", torch.float32)
    one.refill(1)
    one.run(topk)
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.run(topk)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gpu_and_cpu_draft_the_same_ids() -> None:
    one = Round("tiny", torch.float32)
    for seed in range(5):
        one.refill(seed)
        gpu = one.run(2)
        weights = one.weights.to(device="cpu")
        kv = {
            t: KVView.paged(v.k_cache.cpu(), v.v_cache.cpu(), v.block_table.cpu(), v.seq_lens.cpu(),
                            window_left=v.window_left)
            for t, v in one.kv.items()
        }
        lengths = one.lengths.cpu()
        cpu = draft(weights, kv, one.ids.cpu(), one.state.cpu(), lengths, 3, 2, None, lengths)
        assert_same_bits(gpu[0].cpu(), cpu.draft_ids)
