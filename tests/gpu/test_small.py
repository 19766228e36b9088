"""Every op's kernels at small and odd sizes, with all else on the CPU: what runs on the GPU is under test.

`sanitize.py` runs this file under compute-sanitizer. Inputs are copied to the device and results back, so that the only
memory that may be read before it is written is a kernel's own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend_cases import absent, has_frontiers, made, ways
from attention_cases import GARBAGE, LAYOUTS, move, naive, options
from attention_cases import problem as attention_problem
from harness import call, check_numerics, forced, random_tensor
from mtp_kernels.bench.case import Case
from mtp_kernels.bench.inputs import config_of
from mtp_kernels.bench.ops import bench_of
from mtp_kernels.bench.oracle import check_round
from mtp_kernels.bench.run_ops import OpProblem, as_tuple
from test_captured import seeds, views
from test_fused import weights_of

from mtp_kernels import _attention, quantize_lm_head
from mtp_kernels.captured import launch_round
from mtp_kernels.kv_view import KVView
from mtp_kernels.ops import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE, IMPLEMENTATION = "cuda", "triton"
SMALL = ("tiny", "tiny-dense", "pair")  # hidden 32 and 128, backbone 40 and 256, intermediate 48 and 320
LAYERS = ("draft_attention", "norm_linear", "norm_geglu", "linear_norm_add", "post_project")  # small at E2B's sizes too
SIZES = [(1, 1, "bf16"), (3, 4, "fp16"), (20, 1, "bf16"), (2, 1, "fp32")]  # batch, rows, dtype
KV = {"context": 43, "page_size": 5, "layout": "HND"}


def cases() -> list[Case]:
    found = []
    for op in OPS:
        for model in (*SMALL, "E2B") if op in LAYERS else SMALL:
            for variant in bench_of(op).variants(config_of(model)):
                if model == "tiny-dense" and bench_of(op).variants(config_of("tiny")):
                    continue  # the same sizes as tiny's
                for batch, rows, dtype in SIZES:
                    case = Case("op", op, model, batch, rows=rows, variant=variant, dtype=dtype, kv_dtype=dtype, **KV)
                    found.append(case)
    return found


def there_and_back(
    op: str, *args: Any, implementation: str = IMPLEMENTATION, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """The op's results on the CPU, computed on the device."""
    with forced(implementation):
        found = call(op, *(move(a, DEVICE) for a in args), **{name: move(v, DEVICE) for name, v in kwargs.items()})
    return tuple(r.cpu() for r in as_tuple(found))


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"{c.name} {c.model} {c.variant} {c.batch} {c.rows} {c.dtype}")
def test_op(case: Case) -> None:
    one = OpProblem(case, torch.device("cpu"), 0)
    verdict = one.check(0, there_and_back(case.name, *one.sets[0].args, **one.sets[0].kwargs))
    assert verdict.ok, verdict


@pytest.mark.parametrize(("layout", "fp8"), [*((layout, False) for layout in LAYOUTS), ("NHD", True), ("HND", True)])
@pytest.mark.parametrize("flat", [False, True])
def test_attention_with_garbage_behind(layout: str, fp8: bool, flat: bool) -> None:
    lengths = [13, 0, 7, 22]
    extra = options(len(lengths), 2)
    if fp8:
        extra |= {"k_scale": torch.tensor(0.003), "v_scale": torch.tensor([0.003, 0.004])}
    kv_dtype = torch.float8_e4m3fn if fp8 else torch.float16
    args, kwargs = attention_problem(
        lengths, dtype=torch.float16, kv_dtype=kv_dtype, window_left=9, layout=layout, flat=flat, device=DEVICE,
        **{name: move(value, DEVICE) for name, value in extra.items()},
    )  # there: a copy of a view would lose its strides
    (got,) = there_and_back("draft_attention", *args, **kwargs)
    args, kwargs = move(args, "cpu"), {name: move(value, "cpu") for name, value in kwargs.items()}
    check_numerics(got, naive(got.dtype, *args, **kwargs), naive(torch.float64, *args, **kwargs), atol=1e-6)


HEADS_BY_CUDA = [(512, 1, 4, 2), (512, 2, 4, 2), (512, 1, 16, 1), (512, 3, 3, 1), (512, 4, 4, 2)]
HEADS_BY_CUDA += [(256, 1, 8, 4), (256, 4, 4, 4)]
HEADS_BY_CUDA += [(512, 4, 8, 1), (512, 4, 16, 1)] if has_frontiers() else []


@pytest.mark.skipif(bool(absent()), reason=absent() or "runs")
@pytest.mark.parametrize(("heads", "each"), [(h, each) for h in HEADS_BY_CUDA for each in ways(h)], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_attention_by_cuda(
    heads: tuple[int, int, int, int], each: str, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [43, 0, 70, 7]
    args, kwargs = made(heads, lengths, page_size=5, window_left=60, flat=flat)
    monkeypatch.setattr(_attention, "spread", lambda *_: ways(heads)[each])
    (got,) = there_and_back("draft_attention", *args, implementation="cuda", **kwargs)
    args, kwargs = move(args, "cpu"), {name: move(value, "cpu") for name, value in kwargs.items()}
    check_numerics(got, naive(got.dtype, *args, **kwargs), naive(torch.float64, *args, **kwargs), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("suppressed", [False, True])
def test_fp8_head_with_a_reduced_vocabulary(rows: int, suppressed: bool) -> None:
    normed, k = random_tensor(rows, 96, seed=1, dtype=torch.float16), 3
    weight, scale = quantize_lm_head(random_tensor(203, 96, seed=2, dtype=torch.float16))
    kept = {"weight_scale": scale, "token_map": torch.randperm(1000, generator=torch.Generator().manual_seed(3))[:203]}
    if suppressed:
        kept["suppress_ids"] = torch.tensor([*kept["token_map"][:2].tolist(), *GARBAGE])
    logprobs, ids, total = there_and_back("lm_head_topk", normed, weight, k, **kept)
    with forced("reference"):
        expected = call("lm_head_topk", normed, weight, k, **kept)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close((logprobs, total), (expected[0], expected[2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "rows", "topk", "nodes"),
    [*(("centroids", rows, *tree) for rows in (1, 3, 9) for tree in ((1, None), (2, 5))),
     *(("dense", rows, 1, None) for rows in (1, 3, 8)), *(("dense", rows, 2, 5) for rows in (1, 2, 4))],
)
def test_private_kernels(head: str, rows: int, topk: int, nodes: int | None, kernels: str = "fused") -> None:
    weights = weights_of("cpu", torch.bfloat16, head)
    kv = {name: view.with_seq_lens(torch.full((rows,), 21)) for name, view in views(weights, rows).items()}
    ids, state, positions = seeds(weights, rows, 1)
    positions = torch.full_like(positions, 21)
    there = {name: moved(view) for name, view in kv.items()}
    start = (weights.to(device=DEVICE), there, *(t.to(DEVICE) for t in (ids, state, positions)))
    tree = launch_round(kernels, *start, 2, topk, nodes, positions.to(DEVICE))()
    size = tree.draft_ids.size(1)
    verdict = check_round(weights, kv, ids, state, positions, 21, type(tree)(*(t.cpu() for t in tree)), 2, topk, size)
    assert verdict.ok, verdict


def moved(view: KVView) -> KVView:
    tensors = (t.to(DEVICE) for t in (view.k_cache, view.v_cache, view.block_table, view.seq_lens))
    return KVView.paged(*tensors, window_left=view.window_left)
