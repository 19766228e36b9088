"""The heads' Triton kernels at the checkpoints' sizes, compiled for every architecture without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mtp_kernels.triton_ops import centroid_logits, centroid_topk, lm_head_topk, sample_logits
from mtp_kernels.triton_ops._launch import Launch
from triton_compile import ARCHITECTURES, SHARED_LIMIT, compile_launch

from mtp_kernels.weights import PRESETS

CHECKPOINTS = [PRESETS[name] for name in ("E2B", "E4B", "12B", "26B-A4B", "31B")]
DENSE = sorted({(c.vocab, c.hidden) for c in CHECKPOINTS if c.head == "dense"})
SPARSE = sorted({(c.vocab, c.hidden, c.num_centroids, c.num_active) for c in CHECKPOINTS if c.head == "centroid"})


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense(rows: int, k: int) -> Iterator[Launch]:
    for vocab, hidden in DENSE:
        yield from lm_head_topk.plan(meta(rows, hidden), meta(vocab, hidden), k)[0]


def dense_fp8(rows: int, k: int, native: bool) -> Iterator[Launch]:
    for vocab, hidden in DENSE:
        weight, scale = meta(vocab, hidden, dtype=torch.float8_e4m3fn), meta(vocab, dtype=torch.float32)
        token_map = meta(vocab, dtype=torch.int64)
        yield from lm_head_topk.plan(meta(rows, hidden), weight, k, weight_scale=scale, token_map=token_map,
                                     logits_soft_cap=30.0, native_fp8=native)[0]


def sparse(k: int) -> Iterator[Launch]:
    for vocab, hidden, num_centroids, num_active in SPARSE:
        head = (meta(num_centroids, hidden), meta(vocab, dtype=torch.int64), meta(vocab, hidden), num_active)
        yield from centroid_topk.plan(meta(1, hidden), *head, k)[0]
        yield from centroid_logits.plan(meta(1, hidden), *head, centroid_ordered=True)[0]


def draws() -> Iterator[Launch]:
    one, number = meta(1, dtype=torch.float32), meta(1, dtype=torch.int64)
    for vocab, _, num_centroids, num_active in SPARSE:
        candidates = num_active * vocab // num_centroids
        ids = meta(4, candidates, dtype=torch.int64)
        yield from sample_logits.plan(meta(4, candidates, dtype=torch.float32), one, number, number, token_ids=ids)[0]
        yield from sample_logits.plan(meta(4, vocab), one, number, number)[0]


def check(launches: Iterator[Launch], arch: int) -> list[str]:
    """Every kind of launch fits the architecture and spills nothing on Hopper; the PTX of each."""
    distinct = {_kind(launch): launch for launch in launches}
    ptx = []
    for launch in distinct.values():
        compiled = compile_launch(launch, arch)
        name = f"{launch.kernel.fn.__name__} on sm_{arch}"
        assert compiled.shared <= SHARED_LIMIT[arch], name
        assert arch != 90 or compiled.spill_stores == 0, name
        ptx.append(compiled.ptx)
    return ptx


def _kind(launch: Launch) -> Any:
    args = tuple((name, value.dtype if isinstance(value, Tensor) else value) for name, value in launch.args.items())
    return launch.kernel, args, tuple(launch.constants.items()), launch.num_warps, launch.num_stages


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (32, 8), (64, 4)])
def test_dense_head(arch: int, rows: int, k: int) -> None:
    stream, *_ = check(dense(rows, k), arch)
    assert stream.count("cp.async.c") >= 8  # the weight goes past the registers, several stages ahead


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fp8_head(arch: int) -> None:
    """Converted by the instruction where there is one, by integer arithmetic on sm_80."""
    _, stream, *_ = check(dense_fp8(64, 4, native=arch >= 89), arch)
    assert ("e4m3x2" in stream) == (arch >= 89)


# All on Hopper; elsewhere the dtypes take turns, so that every two of arch, rows and dtype still meet.
WORDS = [
    (arch, rows, k, dtype)
    for i, arch in enumerate(ARCHITECTURES) for j, (rows, k) in enumerate([(1, 1), (8, 8), (32, 1), (64, 3)])
    for m, dtype in enumerate([torch.bfloat16, torch.float16]) if arch == 90 or (i + j + m) % 2 == 0
]


@pytest.mark.parametrize(("arch", "rows", "k", "dtype"), WORDS)
def test_fp8_words(arch: int, rows: int, k: int, dtype: torch.dtype) -> None:
    """Two elements an instruction, from shared memory in whole registers; on Hopper a tile's products in one go."""
    for vocab, hidden in DENSE:
        weight, scale = meta(vocab, hidden, dtype=torch.float8_e4m3fn), meta(vocab, dtype=torch.float32)
        launches, _ = lm_head_topk.plan(meta(rows, hidden, dtype=dtype), weight, k, weight_scale=scale,
                                        native_fp8=arch >= 89)
        _, stream, *_ = check(iter(launches), arch)
        assert stream.count("cp.async.c") >= 8
        if 89 <= arch < 100:
            assert "ld.shared.u16" not in stream and "ld.shared.b16" not in stream and "ldmatrix" in stream
            assert not compile_launch(launches[1], arch).serialized


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch >= 90])
@pytest.mark.parametrize("rows", [1, 32])
def test_what_follows_the_first_launch_starts_early(arch: int, rows: int) -> None:
    """They wait before they read what it wrote; the first waits for nothing, so it does not start early."""
    vocab, hidden = DENSE[0]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        scale = None if dtype == torch.bfloat16 else meta(vocab, dtype=torch.float32)
        launches, _ = lm_head_topk.plan(meta(rows, hidden), meta(vocab, hidden, dtype=dtype), 1, weight_scale=scale,
                                        native_fp8=True, early=True)
        assert [launch.early for launch in launches] == [False, *[True] * (len(launches) - 1)]
        for launch, ptx in zip(launches, check(iter(launches), arch), strict=True):
            before, wait, _ = ptx.partition("griddepcontrol.wait")
            assert bool(wait) == launch.early
            assert not wait or ("ld.global" not in before and "cp.async" not in before and "st.global" not in before)


@pytest.mark.parametrize("columns", [95, 96])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_fp8_weights_without_words(columns: int, first: int) -> None:
    """Rows of an odd size, an odd stride or at an odd address are loaded by the element, as are those for fp32."""
    weight, scale = meta(40, 102, dtype=torch.float8_e4m3fn)[:, first : first + columns], meta(40, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        launches, _ = lm_head_topk.plan(meta(3, columns, dtype=dtype), weight, 4, weight_scale=scale, native_fp8=True)
        words = columns == 96 and first != 1 and dtype != torch.float32
        assert len(launches) == 2 + words and launches[-2].constants["WORDS"] == words
        check(iter(launches), 90)
    narrow = meta(40, 101, dtype=torch.float8_e4m3fn)[:, :96]
    launches, _ = lm_head_topk.plan(meta(3, 96), narrow, 4, weight_scale=scale, native_fp8=True)
    assert not launches[-2].constants["WORDS"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("k", [1, 8])
def test_centroid_head(arch: int, k: int) -> None:
    check(sparse(k), arch)


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (32, 8), (64, 4)])
def test_suppressed_tokens(rows: int, k: int) -> None:
    """Nothing spills on Hopper, and the loads of the stream are still several stages ahead."""
    suppress, launches = meta(32, dtype=torch.int64), []
    for vocab, hidden in DENSE:
        launches += lm_head_topk.plan(meta(rows, hidden), meta(vocab, hidden), k, suppress_ids=suppress)[0]
    for vocab, hidden, num_centroids, num_active in SPARSE:
        head = (meta(num_centroids, hidden), meta(vocab, dtype=torch.int64), meta(vocab, hidden), num_active)
        launches += centroid_topk.plan(meta(rows, hidden), *head, k, suppress_ids=suppress)[0]
    _, stream, *_ = check(iter(launches), 90)
    assert stream.count("cp.async.c") >= 8


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sampling(arch: int) -> None:
    """Noise must not come from the hardware's approximate logarithm, nor scaled logits from its division."""
    for ptx in check(draws(), arch):
        assert "lg2.approx" not in ptx and "div.full" not in ptx


@pytest.mark.parametrize("k", [1, 8, 20])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_is_planned_alone(k: int, fp8: bool) -> None:
    """Parts, depths and passes are the same for any number of rows; the tile of rows changes no bit."""
    for vocab, hidden in DENSE:
        weight = meta(vocab, hidden, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
        scale = meta(vocab, dtype=torch.float32) if fp8 else None
        plans = [lm_head_topk.plan(meta(rows, hidden), weight, k, weight_scale=scale)[0] for rows in (1, 32, 500)]
        free = {"BLOCK_M", "HALVES", "BLOCK_K", "STAGES", "AHEAD"}
        fixed = [[{n: v for n, v in launch.constants.items() if n not in free} for launch in plan] for plan in plans]
        assert fixed[0] == fixed[1] == fixed[2]
