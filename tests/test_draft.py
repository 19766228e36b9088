"""draft() against transformers' assistant step by step, trees against an independent expansion, batches, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_bits
from torch import Tensor

from mtp_kernels import ArgumentError, AssistantWeights, KVView, draft
from mtp_kernels.draft import DraftTree, StepOutput, draft_step

WINDOW = 7
PAGE = 4


def synthetic(head: str = "centroid", dtype: torch.dtype = torch.float32) -> AssistantWeights:
    return AssistantWeights.synthetic("tiny" if head == "centroid" else "tiny-dense", dtype=dtype)


def views(weights: AssistantWeights, lengths: list[int], seed: int = 0) -> dict[str, KVView]:
    """A paged view a layer type, each with its own table and page size; requests use disjoint shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer_type, page in (("sliding_attention", PAGE), ("full_attention", PAGE + 3)):
        heads, dim = weights.config.kv_shape(layer_type)
        pages = max(1, -(-max(lengths, default=0) // page))
        total = pages * max(1, len(lengths))
        k, v = torch.randn(2, total, page, heads, dim, generator=generator).to(weights.dtype).unbind()
        table = torch.randperm(total, generator=generator)[: pages * len(lengths)].view(len(lengths), pages)
        window = WINDOW if layer_type == "sliding_attention" else -1
        made[layer_type] = KVView.paged(k, v, table, torch.tensor(lengths, dtype=torch.int32), window_left=window)
    return made


def seeds(weights: AssistantWeights, batch: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(batch, weights.backbone, generator=generator).to(weights.dtype)
    return torch.randint(weights.vocab, (batch,), generator=generator), state


def run(weights: AssistantWeights, lengths: list[int], **options: Any) -> DraftTree:
    ids, state = seeds(weights, len(lengths))
    positions = torch.tensor(lengths, dtype=torch.int64)
    return draft(weights, views(weights, lengths), ids, state, positions, root_positions=positions, **options)


@pytest.mark.parametrize("head", ["centroid", "dense"])
@pytest.mark.parametrize("lengths", [[], [0], [5, 0], [1, 7, 8, 20, 0]])
@pytest.mark.parametrize("topk", [1, 3])
def test_shapes_for_every_batch(head: str, lengths: list[int], topk: int) -> None:
    weights = synthetic(head)
    tree = run(weights, lengths, num_steps=3, topk=topk, num_draft_tokens=4)
    batch = len(lengths)
    assert tree.draft_ids.shape == (batch, 4) and tree.tree_mask.shape == (batch, 4, 4)
    assert ((tree.draft_ids >= 0) & (tree.draft_ids < weights.vocab)).all()
    assert torch.isfinite(tree.cand_scores).all() and (tree.cand_scores <= 0).all()
    assert_same_bits(tree.draft_positions[:, 0], torch.tensor(lengths, dtype=torch.int64))


@pytest.mark.parametrize("topk", [1, 2])
def test_a_batch_equals_each_request_alone(topk: int) -> None:
    """One table, one length, one position a request: neighbours with other lengths change nothing."""
    weights = synthetic()
    lengths = [1, 19, 0, WINDOW, WINDOW + 1]
    ids, state = seeds(weights, len(lengths))
    kv = views(weights, lengths)
    positions = torch.tensor(lengths)
    together = draft(weights, kv, ids, state, positions, 3, topk, root_positions=positions)
    for b in range(len(lengths)):
        one = slice(b, b + 1)
        alone_kv = {
            t: KVView.paged(v.k_cache, v.v_cache, v.block_table[one], v.seq_lens[one], window_left=v.window_left)
            for t, v in kv.items()
        }
        alone = draft(
            weights, alone_kv, ids[one], state[one], positions[one], 3, topk, root_positions=positions[one]
        )
        for name in ("draft_ids", "draft_positions", "parents", "tree_mask", "cand_ids"):
            assert_same_bits(getattr(together, name)[one], getattr(alone, name))
        torch.testing.assert_close(together.cand_scores[one], alone.cand_scores, rtol=1e-5, atol=1e-5)


def test_chain_equals_a_tree_of_one_branch() -> None:
    """The chain's shortcut gives what tree_expand and tree_build give, in every field."""
    from mtp_kernels.draft import _draft_tree

    weights = synthetic()
    lengths = [9, 0, 21]
    ids, state = seeds(weights, 3)
    positions = torch.tensor(lengths)
    kv = views(weights, lengths)
    for size in (None, 1, 3):
        chain = draft(weights, kv, ids, state, positions, 4, 1, size, positions)
        def step(ids: Tensor, state: Tensor, row_index: Tensor | None, kv: Any = kv) -> StepOutput:
            return draft_step(weights, kv, ids, state, positions, row_index=row_index)

        tree = _draft_tree(step, ids, state, 4, 1, size, positions)
        for name, one, two in zip(chain._fields, chain, tree):
            assert_same_bits(one, two) if name != "cand_scores" else torch.testing.assert_close(one, two)


def test_tree_against_an_expansion_written_out() -> None:
    """Each request alone, branch by branch, with one-row steps and Python lists."""
    weights = synthetic()
    lengths, steps, topk = [13, 4], 3, 2
    ids, state = seeds(weights, 2)
    kv = views(weights, lengths)
    positions = torch.tensor(lengths)
    tree = draft(weights, kv, ids, state, positions, steps, topk, None, positions)
    for b in range(2):
        frontier = [(0.0, int(ids[b]), state[b], -1)]  # score, token, state, candidate
        candidates: list[tuple[float, int, int]] = []
        for _ in range(steps):
            grown = []
            for score, token, row_state, parent in frontier:
                step = draft_step(
                    weights, kv, torch.tensor([[token], [token]]), row_state.expand(2, 1, -1), positions, topk=topk
                )
                for j in range(topk):
                    grown.append((score + float(step.logprobs[b, 0, j]), int(step.token_ids[b, 0, j]),
                                  step.state[b, 0], len(candidates)))
                    candidates.append((grown[-1][0], grown[-1][1], parent))
            frontier = sorted(grown, key=lambda g: -g[0])[:topk]
        assert tree.cand_ids[b].tolist() == [c[1] for c in candidates]
        torch.testing.assert_close(tree.cand_scores[b], torch.tensor([c[0] for c in candidates]), rtol=1e-5, atol=1e-5)
        assert tree.parents[b].tolist() == [-1, *(c[2] + 1 for c in candidates)]


def test_swapped_views_change_the_draft() -> None:
    """Every layer type has its own table and page size; one table for both would go unnoticed without this."""
    weights = synthetic()
    lengths = [20, 15]
    ids, state = seeds(weights, 2)
    kv = views(weights, lengths)
    positions = torch.tensor(lengths)
    good = draft(weights, kv, ids, state, positions)
    full = kv["full_attention"]
    shuffled = KVView.paged(full.k_cache, full.v_cache, full.block_table.flip(0), full.seq_lens)
    bad = draft(weights, {**kv, "full_attention": shuffled}, ids, state, positions)
    assert not torch.equal(good.cand_scores, bad.cand_scores)


def test_reordered_head_gives_the_same_draft() -> None:
    weights = synthetic()
    one, two = (run(w, [11, 3], num_steps=3, topk=2) for w in (weights, weights.reordered()))
    for a, b in zip(one, two):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_run(dtype: torch.dtype) -> None:
    tree = run(synthetic(dtype=dtype), [9, 2], num_steps=2, topk=2)
    assert torch.isfinite(tree.cand_scores).all()


def test_compiles_to_one_graph() -> None:
    check_compiled_chain("aot_eager")


def test_compiles_with_inductor(tmp_path: Path) -> None:
    """In a process of its own: inductor's C++ build minds what other tests have imported of distutils."""
    paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    code = "import test_draft; test_draft.check_compiled_chain('inductor')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in paths)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_compiled_chain(backend: str) -> None:
    weights = synthetic()
    lengths = [12, 5]
    ids, state = seeds(weights, 2)
    kv = views(weights, lengths)
    positions = torch.tensor(lengths)

    def chain(ids: Tensor, state: Tensor, positions: Tensor) -> DraftTree:
        return draft(weights, kv, ids, state, positions, 3, 1, None, positions)

    compiled = torch.compile(chain, fullgraph=True, backend=backend)
    for one, two in zip(compiled(ids, state, positions), chain(ids, state, positions)):
        assert_same_bits(one, two)


@pytest.mark.parametrize("topk", [1, 2])
def test_one_compiled_draft_serves_every_batch(topk: int) -> None:
    """More batch sizes than dynamo recompiles for: a size fixed anywhere would be an error. The first is no other size,
    which dynamo would take for the same and compile again."""
    weights = synthetic()
    torch._dynamo.reset()

    def ids_of(kv: dict[str, KVView], ids: Tensor, state: Tensor, positions: Tensor) -> Tensor:
        return draft(weights, kv, ids, state, positions, 1, topk, None, positions).draft_ids

    compiled = torch.compile(ids_of, dynamic=True, fullgraph=True, backend="aot_eager")
    for batch in (5, *range(2, 13)):
        ids, state = seeds(weights, batch)
        inputs = (views(weights, [11] * batch), ids, state, torch.full((batch,), 11))
        assert_same_bits(compiled(*inputs), ids_of(*inputs))


@pytest.mark.parametrize("head", ["centroid", "dense"])
def test_autocast_changes_nothing(head: str) -> None:
    weights = synthetic(head)
    plain = run(weights, [9, 3], num_steps=2, topk=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(weights, [9, 3], num_steps=2, topk=2)
    for one, two in zip(plain, cast):
        assert_same_bits(one, two)


def test_errors_name_the_argument() -> None:
    weights = synthetic()
    lengths = [6, 6]
    ids, state = seeds(weights, 2)
    kv = views(weights, lengths)
    positions = torch.tensor(lengths)
    width = weights.backbone
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"draft: seed_state: expected [2, {width}], got [2, {width - 1}] (the batch of seed_ids, the target's hidden "
         "size)", {"seed_state": state[:, :-1]}),
        ("draft: positions: expected [2], got [1] (the batch of seed_ids)", {"positions": positions[:1]}),
        ("draft: positions: expected int32 or int64, got float32", {"positions": positions.float()}),
        ("draft: seed_ids: expected [*], got [2, 1]", {"seed_ids": ids[:, None]}),
        ("draft: num_steps: expected at least 1, got 0", {"num_steps": 0}),
        ("draft: topk: expected 1 to 16, got 17 (the head's candidates)", {"topk": 17}),
        ("draft: num_draft_tokens: expected 1 to 5, got 6 (root and candidates)", {"num_draft_tokens": 6}),
        ("draft: root_positions: expected a tensor for topk > 1, got None (a tree's nodes have positions of the "
         "target)", {"topk": 2}),
        ("draft: kv['full_attention']: expected a KVView for each layer type of the assistant, got views for "
         "['sliding_attention']", {"kv": {"sliding_attention": kv["sliding_attention"]}}),
        ("draft: kv['full_attention']: expected head_dim 128, got 64",
         {"kv": {**kv, "full_attention": kv["sliding_attention"]}}),
        ("draft: kv['sliding_attention']: expected 2 requests, got 1 (the batch of seed_ids)",
         {"kv": {**kv, "sliding_attention": views(weights, [6])["sliding_attention"]}}),
    ]
    good: dict[str, Any] = {"kv": kv, "seed_ids": ids, "seed_state": state, "positions": positions}
    for message, change in cases:
        with pytest.raises(ArgumentError) as error:
            draft(weights, **{**good, **change})
        assert str(error.value) == message
