"""What CUDA's kernel of draft_attention serves, and what is launched for it; tests/gpu/test_attend.py runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtp_kernels.bench import run_steps
from mtp_kernels.bench.case import Case
from mtp_kernels.triton_ops._launch import Launch
from test_cuda_library import launches, meta_views
from triton_compile import compile_launch

from mtp_kernels import AssistantWeights, _attention, _native, _segment, fused
from mtp_kernels._cuda_launch import CudaLaunch

E4B, E2B, OF_12B = (4, 2), (4, 1), (16, 1)  # query heads, KV heads
OF_31B, FULL_31B = (32, 16), (32, 4)  # of its sliding layers, and of the full one


def call(
    heads: tuple[int, int] = E4B, batch: int = 1, rows: int = 1, context: int = 8192,
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 512, layout: str = "NHD"
) -> tuple[Any, ...]:
    """The arguments of a call without options, on the meta device."""
    pages = batch * context // 16
    q = torch.empty(batch, rows, heads[0], head_dim, dtype=dtype, device="meta")
    shape = (pages, 16, heads[1], head_dim) if layout == "NHD" else (pages, heads[1], 16, head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(2))
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    table = torch.empty(batch, context // 16, dtype=torch.int32, device="meta")
    return q, k, v, table, table[:, 0], 1.0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CUDA library were there: nothing is run."""
    monkeypatch.setattr(_native, "cuda_library", lambda: "")


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        ({}, {}, ""),
        ({"heads": OF_12B, "layout": "HND"}, {"q_norm_weight": torch.empty(512, dtype=torch.bfloat16)}, ""),
        ({"rows": 2}, {"window_left": 5}, ""),
        ({"rows": 4}, {}, ""),
        ({"heads": FULL_31B}, {"capability": 100}, ""),
        ({"heads": OF_12B, "rows": 2}, {}, ""),
        ({"heads": OF_12B, "rows": 4}, {}, ""),
        ({"heads": OF_12B, "rows": 5}, {}, "80 queries of a KV head are more than 64"),
        ({"heads": OF_12B, "rows": 2}, {"capability": 100}, "32 queries of a KV head are more than 16"),
        ({"head_dim": 256, "heads": OF_31B, "rows": 4}, {"window_left": 511}, ""),
        ({"head_dim": 256, "heads": OF_31B, "rows": 5}, {}, "10 queries of a KV head are more than 8"),
        ({"head_dim": 256}, {}, "2 KV heads of 256 elements are fewer than 4"),
        ({"head_dim": 128}, {}, "head_dim 128 is neither of 256, 512"),
        ({"dtype": torch.float16}, {}, "q and caches are not bf16"),
        ({}, {"logits_soft_cap": 3.0}, "logits_soft_cap"),
        ({}, {"q_norm_weight": torch.empty(512)}, "q_norm_weight of torch.float32"),
        ({}, {"capability": 80}, "compute capability 8.0"),
        ({}, {"capability": 120}, "compute capability 12.0"),
        ({}, {"capability": None}, "compute capability 0.0"),
    ],
)
def test_who_is_refused(arguments: dict[str, Any], options: dict[str, Any], why: str) -> None:
    assert _attention.refuses(*call(**arguments), **{"capability": 90, **options}) == why


def test_which_caches_are_refused() -> None:
    q, k, v, *rest = call()
    other = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert _attention.refuses(q, k, other, *rest, capability=90) == "caches with other strides each"
    odd = torch.empty(*k.shape[:3], 516, dtype=k.dtype, device="meta")[..., :512]
    why = "heads that are not multiples of 16 bytes apart"
    assert _attention.refuses(q, odd, odd, *rest, capability=90) == why
    pages = 2**21  # of 16 KB x 2 heads: 64 GB
    for count, why in ((pages, ""), (pages + 1, "a cache of 64 GB or more")):
        large = torch.empty(count, 16, 2, 512, dtype=k.dtype, device="meta")
        assert _attention.refuses(q, large, large, *rest, capability=90) == why


@pytest.mark.parametrize(
    ("heads", "batch", "each", "blocks"),
    [(E4B, 1, 1, 256), (E4B, 8, 8, 256), (E2B, 1, 1, 128), (E2B, 8, 4, 256), (OF_12B, 1, 1, 128), (OF_12B, 8, 8, 128)],
)
@pytest.mark.usefixtures("library")
def test_what_is_launched(heads: tuple[int, int], batch: int, each: int, blocks: int) -> None:
    """Chunks of one request, folds of many, in as many blocks as the SMs have room for; the merge knows them."""
    arguments = call(heads, batch)
    (main, last), output = _attention.plan(*arguments, capability=90, sms=132)
    assert isinstance(main, CudaLaunch) and isinstance(last, Launch) and main.op == "attend"
    assert output.shape == arguments[0].shape and last.args["out_ptr"] is output
    assert main.args["chunks_a_part"] == last.constants["CHUNKS"] == each and main.args["blocks"] == blocks
    assert last.constants["MULTIPLE"] == (64 if heads == OF_12B else 32)
    assert main.args["bound"] == last.args["bound"] == 8192
    for name in ("partial", "stats"):
        assert main.args[name] is last.args[f"{name}_ptr"]
    assert main.args["partial"].shape == (batch * heads[0], last.args["parts"], 512)
    for name in ("chunk_weight", "max_chunks"):
        assert main.args[name] == last.args[name]
    assert main.with_early(True).args == {**main.args, "early": True}


@pytest.mark.parametrize(
    ("heads", "rows", "batch", "context", "each", "column_blocks", "blocks"),
    [
        (OF_12B, 4, 1, 8192, 1, 2, 128), (OF_12B, 4, 1, 65536, 1, 1, 128), (OF_12B, 4, 8, 8192, 8, 2, 128),
        (FULL_31B, 4, 1, 8192, 1, 1, 128), (FULL_31B, 4, 1, 65536, 4, 1, 128), (FULL_31B, 4, 8, 8192, 4, 1, 132),
        (FULL_31B, 8, 1, 8192, 1, 1, 132), (FULL_31B, 8, 64, 4096, 8, 2, 128), (OF_12B, 2, 1, 1024, 1, 1, 8),
    ],
)
@pytest.mark.usefixtures("library")
def test_the_frontier_of_a_tree(
    heads: tuple[int, int], rows: int, batch: int, context: int, each: int, column_blocks: int, blocks: int
) -> None:
    """17 to 64 queries, on Hopper: chunks of few requests, folds of many, which of more than 32 queries two share."""
    (main, last), _ = _attention.plan(*call(heads, batch, rows, context), capability=90, sms=132)
    assert isinstance(main, CudaLaunch) and main.op == "attend" and last.constants["MULTIPLE"] == 128
    found = [main.args[name] for name in ("chunks_a_part", "column_blocks", "blocks")]
    assert found == [each, column_blocks, blocks]
    assert main.args["folds_a_part"] == 1 and last.constants["CHUNKS"] == each


@pytest.mark.parametrize("queries", range(17, 65))
def test_a_frontier_has_its_kernels(queries: int) -> None:
    """Folds have registers: two blocks share them, or there are 32 queries at most."""
    c = _attention.config(512, queries, 1, 1, 90)
    found = _attention.ways(100, queries, c)
    assert (1, 1) in found and all(way == 1 or shared_by == 2 or queries <= 32 for way, shared_by in found)
    assert {way for way, _ in found} == {1, c.fold}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("heads", [E4B, E2B, OF_12B, (6, 3), (20, 10), OF_31B])
@pytest.mark.parametrize("context", [16, 48, 1024, 65536])
@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.usefixtures("library")
def test_there_are_parts_enough(heads: tuple[int, int], context: int, head_dim: int, rows: int) -> None:
    """For the chunks that the kernel makes of any length; and every KV head has the same share of the blocks."""
    for batch in (1, 3, 64):
        arguments = call(heads, batch, rows, context, head_dim=head_dim)
        if why := _attention.refuses(*arguments, capability=90):
            queries = rows * heads[0] // heads[1]
            assert "KV head" in why and head_dim == 256 and (queries > 8 or heads[1] < 4)
            continue
        (main, last), _ = _attention.plan(*arguments, capability=90, sms=132)
        args, multiple = main.args, last.constants["MULTIPLE"]
        parts = args["partial"].size(1)
        for visible in {n for n in (1, 31, 32, 33, context // 3 + 1, context - 1, context) if n <= context}:
            keys = max(int((visible * args["chunk_weight"]) ** 0.5 + 0.999999), -(-visible // args["max_chunks"]), 1)
            chunks = -(-visible // (-(-keys // multiple) * multiple))
            assert -(-chunks // args["chunks_a_part"]) <= parts
        assert args["blocks"] % heads[1] == 0 and heads[1] <= args["blocks"] <= max(2 * 132, heads[1])
        assert args["max_chunks"] & (args["max_chunks"] - 1) == 0


def test_the_same_chunks_for_any_batch() -> None:
    """What a row's bits follow is not what its neighbours are."""
    for heads, keys, weight in ((E4B, 32, 0.5), (E2B, 32, 0.5), (OF_12B, 64, 0.5), (FULL_31B, 32, 2.0)):
        c = _attention.config(512, 1, *heads, 90)
        assert (c.block_n, c.chunk_weight) == (keys, weight) and c.fold in (4, 8)
        assert _attention.spread(2, 128, 64, 2, 132, c) == (1, 1)
        assert _attention.spread(128, 128, 64, 2, 132, c) == (c.fold, 1)
    assert _attention.spread(8, 1, 32, 2, 132, c) == (1, 1)
    c = _attention.config(512, 1, *OF_12B, 90)  # two folds where it can
    for batch, chunks, each in ((1, 128, 1), (8, 128, 8), (64, 64, 16), (132, 8, 8)):
        assert _attention.spread(batch, chunks, 64, 16, 132, c) == (each, 1)
    c = _attention.config(512, 1, *FULL_31B, 90)  # and where no block would be without a part
    for batch, chunks, keys, each in ((1, 64, 128, 1), (8, 64, 128, 8), (16, 64, 128, 16), (64, 43, 96, 16)):
        assert _attention.spread(4 * batch, chunks, keys, 8, 132, c) == (each, 1)


@pytest.mark.parametrize("reason", ["no library", "q at an odd place", "no key"])
def test_triton_serves_the_rest(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_library", lambda: "not built" if reason == "no library" else "")
    q, k, v, table, lengths, scale = call(context=16)
    if reason == "q at an odd place":
        q, k, v = (torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape) for t in (q, k, v))
        table, lengths = table.new_zeros(table.shape, device="cpu"), lengths.new_zeros(lengths.shape, device="cpu")
        assert q.data_ptr() % 16
    options = {"max_seq_len": 0} if reason == "no key" else {}
    made, output = _attention.plan(q, k, v, table, lengths, scale, capability=90, **options)
    assert all(isinstance(launch, Launch) for launch in made) and output.shape == q.shape


@pytest.mark.parametrize("model", ["E2B", "E4B"])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.usefixtures("library")
def test_a_round_on_segments(model: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full layer of a step is CUDA's and starts early; its segment merges what it leaves."""
    monkeypatch.setattr(fused, "capability", lambda device: 90)
    made = launches(model, batch, 4096)
    mine = [i for i, x in enumerate(made) if isinstance(x, CudaLaunch) and x.op == "attend"]
    assert len(mine) == 2  # steps
    for i in mine:
        attention, segment = made[i].args, made[i + 1].args
        assert attention["early"] and attention["q"].size(3) == 512 and made[i + 1].op == "segment"
        for name in ("partial", "stats", "bound", "chunk_weight", "max_chunks", "chunks_a_part"):
            assert segment[name] is attention[name] or segment[name] == attention[name]
        assert segment["chunk_multiple"] == 32 and segment["num_kv_heads"] == attention["k_cache"].size(2)


@pytest.mark.parametrize("model", ["E2B", "E4B"])
@pytest.mark.usefixtures("library")
def test_the_first_attention_leaves_a_segment_room(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs of it, 128 threads each, and a segment's block of 256: 65536 registers, and nothing spilt."""
    monkeypatch.setattr(fused, "capability", lambda device: 90)
    for batch in (1, 2, 8):
        made = launches(model, batch, 1024)
        step = [x for x in made[: len(made) // 2] if isinstance(x, Launch) and x.kernel.fn.__name__ == "attend"]
        assert [x.registers for x in step] == [_segment.REGISTERS if batch > 1 else 0, 0, 0]
    assert 3 * 128 * _segment.REGISTERS + 256 * 128 <= 65536
    for arch in (90, 100):
        compiled = compile_launch(step[0], arch)
        assert compiled.registers <= _segment.REGISTERS and compiled.spill_stores == 0


@pytest.mark.parametrize(("model", "kernels"), [("31B", "fused"), ("E2B", "segments")])
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.usefixtures("library")
def test_a_benchmark_says_what_serves_a_round(
    model: str, kernels: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "capability", lambda device: capability)
    weights = AssistantWeights.synthetic(model, device="meta")
    ids = torch.empty(1, dtype=torch.int64, device="meta")
    state = torch.empty(1, weights.backbone, dtype=weights.dtype, device="meta")
    one = run_steps.StepInputs(weights, meta_views(weights, 1, 1024), ids, state, ids)
    by = "cuda and triton" if capability == 90 or kernels == "segments" else "triton"
    assert run_steps._fused_by(one, Case("step", "chain", model), kernels) == f"{by}, {kernels}"
