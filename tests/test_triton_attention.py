"""The launches of draft_attention at the sizes of the five checkpoints, compiled without a GPU."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mtp_kernels.triton_ops._launch import Launch
from mtp_kernels.triton_ops.draft_attention import Config, config, count_chunks, most_keys_a_chunk, plan
from triton_compile import ARCHITECTURES, SHARED_LIMIT, compile_launch

from mtp_kernels.ops.draft_attention import triton_serves
from mtp_kernels.weights import PRESETS

FP8 = torch.float8_e4m3fn
CHECKPOINTS = ["E2B", "E4B", "12B", "26B-A4B", "31B"]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(checkpoint: str, layer: int, rows: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: int,
             batch: int = 2, pages: int = 4096) -> list[Launch]:
    """Of one layer's attention, sliding (0) or full (1), over pages of 16 keys."""
    c = PRESETS[checkpoint]
    a = c.attention[layer]
    cache = (100, 16, a.num_kv_heads, a.head_dim)
    extra: dict[str, Any] = {"k_scale": meta(1), "v_scale": meta(1)} if kv_dtype == FP8 else {}
    made, output = plan(
        meta(batch, rows, c.num_qo_heads, a.head_dim, dtype=dtype), meta(*cache, dtype=kv_dtype),
        meta(*cache, dtype=kv_dtype), meta(batch, pages, dtype=torch.int32), meta(batch, dtype=torch.int64), 1.0,
        window_left=c.sliding_window - 1 if layer == 0 else -1, q_norm_weight=meta(a.head_dim, dtype=dtype),
        rope_inv_freq=meta(a.num_pairs), positions=meta(batch, dtype=torch.int64), capability=capability, **extra)
    assert output.shape == (batch, rows, c.num_qo_heads, a.head_dim) and output.dtype == dtype
    return made


def distinct(made: list[Launch]) -> list[Launch]:
    """One of each set of launches that Triton compiles once: sizes that are no constants are not specialised."""
    def key(launch: Launch) -> tuple[Any, ...]:
        types = tuple((n, getattr(v, "dtype", None)) for n, v in launch.args.items() if isinstance(v, torch.Tensor))
        return str(launch.kernel), types, tuple(launch.constants.items()), launch.num_warps, launch.num_stages

    return list({key(launch): launch for launch in made}.values())


def way(launch: Launch) -> tuple[bool, bool]:
    """Whether a program folds chunks, and whether it runs several of what it has."""
    return launch.constants["CHUNKS"] > 1, launch.constants["RUNS"]


def one_of_each_tile(made: list[Launch], folding: bool = True) -> list[Launch]:
    """Of each tile the launch with the most stages, and of these one that runs several parts, which takes the most
    registers; with `folding` one that folds and one that does not. Each way and each kind of merge once at least."""
    tile = ("HEAD_DIM", "BLOCK_ROWS", "BLOCK_GROUP", "BLOCK_N", "SLABS", "V_SLABS")
    found: dict[tuple[Any, ...], Launch] = {}
    for launch in sorted(made, key=lambda x: (x.constants.get("STAGES", 0), x.constants.get("RUNS", False))):
        c = launch.constants
        if "RUNS" in c:
            found[(*(c[name] for name in tile), folding and c["CHUNKS"] > 1)] = launch
        else:
            found[c["HEAD_DIM"], c["WIDE"], c["CHUNKS"] < c["FOLD"]] = launch
    chosen = list(found.values())
    ways = {way(x) for x in chosen if "RUNS" in x.constants}
    others = {way(x): x for x in made if "RUNS" in x.constants and way(x) not in ways}
    return [*chosen, *others.values()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_launches_compile(arch: int, kv_dtype: torch.dtype) -> None:
    """Programs of a chunk, of several, of a fold of chunks and of several; all sizes of bf16 on Hopper.

    Of fp8 on Hopper each tile with folding and without; for other GPUs one launch of each tile: the rest differ in how
    many chunks a program has.
    """
    hopper = arch == 90
    names = CHECKPOINTS if hopper and kv_dtype == torch.bfloat16 else ["12B", "31B"]
    made = [x for name in names for layer in (0, 1) for rows in (1, 4) for batch in (1, 8, 64)
            for x in launches(name, layer, rows, torch.bfloat16, kv_dtype, arch, batch, pages=512)]
    if kv_dtype == FP8:
        made = [x for x in made if "k_ptr" in x.args]  # the merge is the same
    chosen = distinct(made) if hopper and kv_dtype != FP8 else one_of_each_tile(made, folding=hopper)
    ways = {way(x) for x in chosen if "RUNS" in x.constants}
    assert ways == {(False, False), (False, True), (True, False), (True, True)}
    for launch in chosen:  # not in threads: ast.parse of Python 3.11, which Triton calls, fails in two at a time
        compiled = compile_launch(launch, arch)
        assert compiled.shared <= SHARED_LIMIT[arch]
        assert "sin.approx" not in compiled.ptx and "cos.approx" not in compiled.ptx
        if arch == 90:
            assert compiled.spill_stores == 0
        if "STAGES" in launch.constants and not launch.constants["ONE_TILE"]:
            assert "cp.async" in compiled.ptx  # tiles of K and V are loaded ahead


@pytest.mark.parametrize("dtypes", [(torch.float16, FP8), (torch.float32, torch.float32)])
def test_no_spills_of_other_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """On Hopper, of each tile with folding and without. Of fp32, 16 queries that share 12B's one KV head take a few
    registers more than there are."""
    made = [x for name in CHECKPOINTS for layer in (0, 1) for rows in (1, 4) for batch in (1, 8, 64)
            for x in launches(name, layer, rows, *dtypes, 90, batch, pages=512)
            if "k_ptr" in x.args and (dtypes[0] != torch.float32 or (name, layer) != ("12B", 1))]
    assert {compile_launch(launch, 90).spill_stores for launch in one_of_each_tile(made)} == {0}


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_two_programs_share_an_sm_of_hopper_in_a_chain(name: str, batch: int) -> None:
    """But of 12B's 16 queries a KV head where there is a program an SM anyway."""
    attend = launches(name, 1, 1, torch.bfloat16, torch.bfloat16, 90, batch, pages=512)[0]
    compiled = compile_launch(attend, 90)
    programs = 1 if name == "12B" and math.prod(attend.grid) <= 132 else 2
    assert programs * (compiled.shared + 1024) <= 228 * 1024
    assert programs * 32 * attend.num_warps * -(-compiled.registers // 8) * 8 <= 65536


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_a_warp_reads_of_a_slab_lies_in_different_banks(name: str, batch: int) -> None:
    """Slabs are the slowest dimension in shared memory, and its rows are swizzled."""
    attend = launches(name, 1, 1, torch.bfloat16, torch.bfloat16, 90, batch, pages=512)[0]
    text = compile_launch(attend, 90).ttgir
    layouts = dict(re.findall(r"^(#shared\d*) = #ttg.swizzled_shared<\{(.*)\}>", text, re.MULTILINE))
    tiles = set(re.findall(r"async_copy_global_to_local .* -> <4x\d+x\d+xbf16, (#shared\d*),", text))
    assert tiles or attend.constants["ONE_TILE"]
    for tile in tiles:
        assert "maxPhase = 8" in layouts[tile] and layouts[tile].endswith(", 0]")


@pytest.mark.parametrize("name", ["E2B", "E4B"])
def test_a_segment_of_8_rows_fits_beside_two_programs_of_a_sliding_layer(name: str) -> None:
    """Its 256 threads have at most 160 registers (csrc/cuda/segment.cu), of the 65536 of an SM."""
    attend = launches(name, 0, 1, torch.bfloat16, torch.bfloat16, 90, batch=8, pages=512)[0]
    compiled = compile_launch(attend, 90)
    assert math.prod(attend.grid) <= 2 * 132
    assert 2 * 32 * attend.num_warps * -(-compiled.registers // 8) * 8 + 256 * 160 <= 65536


def test_what_parts_write_and_read_again_is_little() -> None:
    """Where many requests keep a GPU busy: in folds, and beside the keys' bytes."""
    for name in CHECKPOINTS:
        made = launches(name, 1, 1, torch.bfloat16, torch.bfloat16, 90, batch=64, pages=512)
        a = PRESETS[name].attention[1]
        partial = 2 * 4 * made[0].args["partial_ptr"].numel()
        keys = 2 * 2 * 64 * 512 * 16 * a.num_kv_heads * a.head_dim
        assert made[0].constants["CHUNKS"] > 1
        assert partial <= {"E2B": 0.035, "26B-A4B": 0.035, "12B": 0.05}.get(name, 0.02) * keys


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("layer", [0, 1])
def test_sizes_do_not_follow_batch_or_table(checkpoint: str, layer: int) -> None:
    few, many = (launches(checkpoint, layer, 4, torch.bfloat16, torch.bfloat16, 90, batch, pages)
                 for batch, pages in ((1, 100), (64, 10000)))
    free = {"CHUNKS", "RUNS", "ONE_TILE", "LATE", "STAGES"}  # change no bit, nor the tile of a merge and its warps
    for one, two in zip(few, many):  # a merge more where the table has room for more parts
        names = {"FOLD", "MULTIPLE"} if "FOLD" in one.constants else one.constants.keys() - free
        assert all(one.constants[n] == two.constants[n] for n in names)
        assert one.num_warps == two.num_warps or "FOLD" in one.constants
        assert all(one.args[n] == two.args[n] for n in ("max_chunks", "chunk_weight"))


@pytest.mark.parametrize("weight", [0.125, 0.5, 1.0, 1.875, 8.0])
@pytest.mark.parametrize("max_chunks", [8, 64, 128])
def test_the_planned_chunks_are_enough(weight: float, max_chunks: int) -> None:
    """For every number of keys up to the bound: `chunk_size` of the kernels, in the same fp32."""
    c = Config(512, 1, 8, block_n=32, slabs=4, v_slabs=1, max_chunks=max_chunks, chunk_weight=weight,
               fold=8, num_warps=4, stages=3)
    keys = torch.cat([torch.arange(1, 100_000), 2 ** torch.arange(17, 30), 2 ** torch.arange(17, 30) + 1])
    chunk = (keys.float() * weight).sqrt().ceil().int()
    chunk = -(-torch.maximum(chunk, -(-keys // max_chunks)) // 32) * 32
    needed = -(-keys // chunk)
    for n, most, largest in zip(keys.tolist(), needed.cummax(0).values.tolist(), chunk.cummax(0).values.tolist()):
        assert most <= count_chunks(n, c) <= max_chunks
        assert most_keys_a_chunk(n, c) > 32 or largest <= 32  # a chunk whose tile is loaded first


def test_a_tile_holds_every_query() -> None:
    for rows in (1, 2, 3, 5, 16, 100):
        for group in (1, 3, 8, 16, 64):
            for head_dim in (64, 512):
                for capability in ARCHITECTURES:
                    c = config(head_dim, rows, 2 * group, 2, torch.bfloat16, torch.bfloat16, capability)
                    assert c.block_group >= group and math.log2(c.block_rows * c.block_group) in (3, 4, 5, 6)


def test_serves() -> None:
    q, k = meta(1, 1, 16, 512), meta(1, 16, 2, 512)
    assert triton_serves(q, k) == ""
    assert triton_serves(q[..., :80], k[..., :80]) == "head_dim 80 is not 64, 128, 256 or 512"
    assert triton_serves(meta(1, 1, 65, 64), k[:, :, :1]) == "65 query heads a KV head are more than 64"
