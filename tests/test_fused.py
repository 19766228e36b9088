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
HEAD = pytest.mark.parametrize("head", ["centroids", "dense"])


def config() -> AssistantConfig:
    """The smallest that the kernels take: 16 centroids of 4 tokens."""
    return replace(PRESETS["tiny"], backbone=48, num_centroids=16, num_active=4)


def weights_of(device: str, dtype: torch.dtype, head: str = "centroids") -> AssistantWeights:
    model = config() if head == "centroids" else PRESETS["tiny-dense"]
    return AssistantWeights.synthetic(model, dtype=dtype).to(device)


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
@pytest.mark.parametrize(
    ("head", "rows"),  # a warp a program, four warps, sums in a kernel of their own; one row of a tile, some, all
    [*(("centroids", rows) for rows in (1, 3, 9)), *(("dense", rows) for rows in (1, 3, 8))],
)
def test_chain(implementation: str, device: str, head: str, rows: int) -> None:
    """In fp64 the ids of the two are those of one model: fed back, they must have the largest logits.

    Keys are small: at a deviation of 1 attention is nearly a choice of one key, and rounding decides which, for public
    ops as well.
    """
    from mtp_kernels.bench.oracle import check_round, check_steps

    for dtype in dtypes(device):
        weights = weights_of(device, dtype, head)
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
@HEAD
def test_tree(implementation: str, device: str, head: str) -> None:
    from mtp_kernels.bench.oracle import check_round

    from mtp_kernels import fused

    for dtype in dtypes(device):
        weights = weights_of(device, dtype, head)
        kv = {name: replace(v, seq_lens=torch.full_like(v.seq_lens, 9)) for name, v in views(weights, 2).items()}
        ids, state, positions = seeds(weights, 2, 2)
        positions = torch.full_like(positions, 9)
        made = fused.draft_tree(fused.Drafter(weights, kv, positions), ids, state, 2, 2, 5, positions)
        verdict = check_round(weights, kv, ids, state, positions, 9, made, 2, 2, 5)
        assert verdict.ok, verdict


@TRITON
@ON
@HEAD
def test_lengths_of_zero_and_garbage_behind_them(implementation: str, device: str, head: str) -> None:
    """A padded request reads no page, and its neighbour does not notice."""
    dtype = dtypes(device)[0]
    weights = weights_of(device, dtype, head)
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


@TRITON
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 8), (torch.float16, 3)])
@pytest.mark.parametrize("hidden", [64, 512])  # of one row of weights a warp has all columns, or some
def test_dense_rows_are_multiplied_alone(
    implementation: str, device: str, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    """As many rows as a tile has, and 16 bits, in the interpreter; bits are a GPU's to show."""
    model = replace(PRESETS["tiny-dense"], hidden=hidden, num_qo_heads=hidden // 32)
    weights = AssistantWeights.synthetic(model, dtype=dtype)
    kv = {name: replace(v, k_cache=v.k_cache * 0.1) for name, v in views(weights, rows).items()}
    seed = seeds(weights, rows, 6)
    together = chain(weights, kv, seed, 1)
    for i in (0, 2, rows - 1):
        alone = chain(weights, some(kv, slice(i, i + 1)), tuple(s[i : i + 1] for s in seed), 1)
        for one, two in zip(together, alone):
            torch.testing.assert_close(one[i : i + 1], two)


def test_reasons() -> None:
    """On a CPU without the interpreter, the library's whole step."""
    weights = AssistantWeights.synthetic("tiny-dense", dtype=torch.float32)
    kernels, reason = choose_kernels(weights, views(weights, 1), 1)
    assert (kernels, reason) in (("step", ""), ("fused", "the head is dense")) or (kernels == "ops" and reason)
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
    ):
        assert choose_kernels(model, views(model, 1), topk) == ("ops", why)
    for batch, topk in ((8, 1), (2, 4), (1, 8)):
        assert choose_kernels(dense, views(dense, 1), topk, None, batch) == ("fused", "the head is dense")
    for batch, topk, rows in ((9, 1, 9), (3, 4, 12), (2, 8, 16)):
        why = f"{rows} rows of a dense head are more than 8"
        assert choose_kernels(dense, views(dense, 1), topk, None, batch) == ("ops", why)
    for model in (weights, dense):
        layer = replace(model.layers[0], down=model.layers[0].down.t().contiguous().t())
        turned = replace(model, layers=(layer, *model.layers[1:]))
        why = "layers.0.down, whose last dimension is not contiguous"
        assert choose_kernels(turned, views(turned, 1), 1) == ("ops", why)
        other = replace(model, lm_head=model.lm_head.double())
        assert choose_kernels(other, views(other, 1), 1) == ("ops", "lm_head of torch.float64")
    wide = AssistantWeights.synthetic(replace(PRESETS["tiny-dense"], hidden=2048, num_qo_heads=4), dtype=dtype)
    why = "hidden 2048 is not a power of 2 from 16 to 1024"
    assert choose_kernels(wide.to(device), views(wide, 1), 1) == ("ops", why)
