"""The private kernels of a captured round give what the public ops give, and a row's bits follow nothing but the row.

The oracle is fp64 fed with the kernels' own tokens. On a CPU they run in Triton's interpreter, whose products are
numpy's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import DEVICES
from test_captured import seeds, some, views
from torch import Tensor

from mtp_kernels import AssistantWeights, CapturedDraft, KVView
from mtp_kernels.captured import choose_kernels
from mtp_kernels.draft import chain_links
from mtp_kernels.weights import PRESETS, AssistantConfig

OP = "draft_attention"  # where that has a Triton kernel, so has the round
TRITON = pytest.mark.parametrize("implementation", ["triton"])
ON = pytest.mark.parametrize("device", DEVICES)


def config() -> AssistantConfig:
    """The smallest that the kernels take: 16 centroids of 4 tokens."""
    return replace(PRESETS["tiny"], backbone=48, num_centroids=16, num_active=4)


def weights_of(device: str, dtype: torch.dtype) -> AssistantWeights:
    return AssistantWeights.synthetic(config(), dtype=dtype).to(device)


def dtypes(device: str) -> list[torch.dtype]:
    """16 bits is what the kernels serve on a GPU; fp32 shows the formula in the interpreter."""
    return [torch.bfloat16, torch.float16] if device == "cuda" else [torch.float32]


def chain(
    weights: AssistantWeights, kv: dict[str, KVView], seed: tuple[Tensor, Tensor, Tensor], num_steps: int,
    early: bool = False
) -> list[Tensor]:
    """Every tensor that drafting a chain gives."""
    from mtp_kernels import fused

    ids, state, positions = seed
    made = fused.draft_chain(fused.Drafter(weights, kv, positions, early), ids, state, num_steps, None, positions + 1)
    assert made.draft_positions is not None
    return [made.draft_ids, made.draft_positions, made.cand_ids, made.cand_scores, *made.states]


@TRITON
@ON
@pytest.mark.parametrize("rows", [1, 3, 9])  # a warp a program, four warps, sums in a kernel of their own
def test_chain(implementation: str, device: str, rows: int) -> None:
    """In fp64 the ids of the two are those of one model: fed back, they must have the largest logits.

    Keys are small: at a deviation of 1 attention is nearly a choice of one key, and rounding decides which, for public
    ops as well.
    """
    from mtp_kernels.bench.oracle import check_round, check_steps

    for dtype in dtypes(device):
        weights = weights_of(device, dtype)
        kv = {
            name: replace(v, k_cache=v.k_cache * 0.1, seq_lens=torch.full_like(v.seq_lens, 21))
            for name, v in views(weights, rows).items()
        }
        ids, state, positions = seeds(weights, rows, 1)
        positions = torch.full_like(positions, 20)
        draft_ids, draft_positions, cand_ids, scores, *states = chain(weights, kv, (ids, state, positions), 2)
        verdict = check_steps(weights, kv, ids, state, positions, 21, cand_ids.unbind(1), states)
        assert verdict.ok, verdict
        assert torch.equal(draft_ids, torch.cat([ids.unsqueeze(1), cand_ids], 1))
        assert torch.equal(draft_positions, positions.unsqueeze(1) + 1 + torch.arange(3, device=device))
        tree = chain_links(draft_ids, draft_positions - 1, cand_ids, scores)  # the oracle's root is at `positions`
        verdict = check_round(weights, kv, ids, state, positions, 21, tree, 2, 1, 3)
        assert verdict.ok, verdict


@TRITON
@ON
def test_tree(implementation: str, device: str) -> None:
    from mtp_kernels.bench.oracle import check_round

    from mtp_kernels import fused

    for dtype in dtypes(device):
        weights = weights_of(device, dtype)
        kv = {name: replace(v, seq_lens=torch.full_like(v.seq_lens, 9)) for name, v in views(weights, 2).items()}
        ids, state, positions = seeds(weights, 2, 2)
        positions = torch.full_like(positions, 9)
        made = fused.draft_tree(fused.Drafter(weights, kv, positions), ids, state, 2, 2, 5, positions)
        verdict = check_round(weights, kv, ids, state, positions, 9, made, 2, 2, 5)
        assert verdict.ok, verdict


@TRITON
@ON
def test_lengths_of_zero_and_garbage_behind_them(implementation: str, device: str) -> None:
    """A padded request reads no page, and its neighbour does not notice."""
    dtype = dtypes(device)[0]
    weights = weights_of(device, dtype)
    kv = views(weights, 2)
    kv = {name: replace(view, seq_lens=torch.tensor([7, 0], device=device)) for name, view in kv.items()}
    for view in kv.values():
        view.block_table[1] = -1
    seed = seeds(weights, 2, 3)
    both = chain(weights, kv, seed, 2)
    alone = chain(weights, some(kv, slice(0, 1)), (seed[0][:1], seed[1][:1], seed[2][:1]), 2)
    for one, two in zip(both, alone):
        assert torch.isfinite(one.float()).all()
        torch.testing.assert_close(one[:1], two)


def test_reasons() -> None:
    """On a CPU without the interpreter, the library's whole step."""
    weights = AssistantWeights.synthetic("tiny-dense", dtype=torch.float32)
    assert choose_kernels(weights, views(weights, 1), 1) in (("step", ""), ("ops", "the head is dense"))
    runner = CapturedDraft(weights, views(weights, 1), 1, private=False)
    assert (runner.kernels, runner.reason) == ("ops", "private=False")


@TRITON
@ON
def test_chooses(implementation: str, device: str) -> None:
    dtype = dtypes(device)[0]
    weights = weights_of(device, dtype)
    no_segments = "no CUDA kernels on cpu" if device == "cpu" else "hidden 32 is not 256"
    assert choose_kernels(weights, views(weights, 1), 1) == ("fused", no_segments)
    odd = AssistantWeights.synthetic("tiny", dtype=dtype).to(device)
    dense = AssistantWeights.synthetic("tiny-dense", dtype=dtype).to(device)
    for model, topk, why in (
        (weights, 65, "topk above 64"),
        (odd, 1, "a projection whose columns are no multiple of 16"),
        (dense, 1, "the head is dense"),
    ):
        assert choose_kernels(model, views(model, 1), topk) == ("ops", why)
