"""CUDA's kernels of draft_attention without a GPU: their source, compiled for this CPU (emulation/), against fp64.

Threads are coroutines there, one warp of a block runs only when all others wait, shared memory begins as NaN, and
asynchronous copies arrive as late as they may.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attend_cases import FRONTIERS, HEADS, LENGTHS, OPTIONS, made, ways
from attention_cases import naive
from emulated import compiled
from harness import assert_same_bits, check_numerics
from mtp_kernels.triton_ops._launch import Launch
from torch import Tensor

from mtp_kernels import _attention, _native
from mtp_kernels._cuda_launch import CudaLaunch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="coroutines are glibc's")

Emulate = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Emulate:
    """Runs a launch of mtp_cuda::attend, by its arguments."""
    run = compiled("attend", tmp_path_factory.mktemp("emulated")).emulate_attend

    def launch(a: dict[str, Any]) -> None:
        q, k, v, table, lengths, indptr, positions, scale = (
            a[name]
            for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens", "kv_indptr", "positions", "k_scale")
        )
        pointers = (q, k, v, table, lengths, indptr, a["norm"], a["freq"], positions, scale, a["partial"], a["stats"])
        numbers = (
            *(t is not None and t.dtype == torch.int64 for t in (table, lengths, indptr, positions)), *q.stride()[:3],
            *k.stride()[:3], v.stride(2), 0 if indptr is not None else table.stride(0), table.size(-1),
            0 if positions is None else positions.stride(0),
            0 if positions is None or positions.dim() == 1 else positions.stride(1),
            0 if scale is None or scale.numel() == 1 else 1, *k.shape[:2], a["bound"], a["max_chunks"].bit_length() - 1,
            a["chunks_a_part"], a["folds_a_part"], a["column_blocks"], a["partial"].size(1), *q.shape[:2], k.size(2),
            q.size(2) // k.size(2), q.size(3), 0 if a["freq"] is None else a["freq"].numel(),
        )
        wrong = run(
            (ctypes.c_void_p * len(pointers))(*(None if t is None else t.data_ptr() for t in pointers)),
            (ctypes.c_int64 * len(numbers))(*(int(n) for n in numbers)),
            (ctypes.c_float * 3)(a["chunk_weight"], a["sm_scale"], a["eps"]), a["blocks"],
        )
        assert wrong == 0, "a block wrote behind its shared memory"

    return launch


@pytest.fixture(autouse=True)
def library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_library", lambda: "")


def launches(args: tuple[Any, ...], kwargs: dict[str, Any], sms: int = 132) -> tuple[dict[str, Any], Launch]:
    """The arguments of the kernel, with NaN in what it has to write, and the merge."""
    (main, last), _ = _attention.plan(*args, **kwargs, capability=90, sms=sms)
    assert isinstance(main, CudaLaunch) and isinstance(last, Launch)
    for name in ("partial", "stats"):
        main.args[name].fill_(torch.nan)
    return main.args, last


def merged(left: dict[str, Any], last: Launch, args: tuple[Any, ...], v_scale: Tensor | None) -> Tensor:
    """The result, of parts that are folded in fp64."""
    q, seq_lens = args[0], args[4]
    heads, per_request, group = q.size(2), q.size(1) * q.size(2), last.args["group"]
    scales = torch.ones(1) if v_scale is None else v_scale.flatten()
    output = torch.zeros(q.numel() // q.size(3), q.size(3), dtype=torch.float64)
    for i, (partial, stats) in enumerate(zip(left["partial"].double(), left["stats"].double())):
        visible = min(int(seq_lens[i // per_request]), left["bound"])
        least = max(math.ceil(math.sqrt(visible * left["chunk_weight"])), up(visible, left["max_chunks"]), 1)
        multiple = last.constants["MULTIPLE"]
        parts = up(up(visible, up(least, multiple) * multiple), left["chunks_a_part"])
        assert stats[parts:].isnan().all() and partial[parts:].isnan().all(), "a part that there is not was written"
        if parts:
            weights = torch.exp2(stats[:parts, 0] - stats[:parts, 0].max())
            average = weights @ partial[:parts] / (weights @ stats[:parts, 1])
            output[i] = average * scales[i % heads // group % len(scales)]
    return output.view(q.shape).to(q.dtype)


def up(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(n // -size)


def cases() -> list[tuple[tuple[int, int, int, int], list[int], dict[str, Any], str]]:
    """Every option with every list of lengths; heads, and what a part is, in turn."""
    pairs = [(lengths, more) for more in OPTIONS for lengths in LENGTHS]
    found = []
    for all_heads in (HEADS, FRONTIERS):
        for i, pair in enumerate(pairs):
            heads = all_heads[(3 * i + i // len(all_heads)) % len(all_heads)]
            each = list(ways(heads))
            found.append((heads, *pair, each[(i + i // 4) % len(each)]))
    return found


@pytest.mark.parametrize(("heads", "lengths", "more", "each"), cases(), ids=str)
def test_against_fp64(
    heads: tuple[int, int, int, int], lengths: list[int], more: dict[str, Any], each: str, emulate: Emulate,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = {name: torch.tensor(value) for name, value in more.items() if name.endswith("_scale")}
    args, kwargs = made(heads, lengths, "cpu", **{**more, **scales})
    monkeypatch.setattr(_attention, "spread", lambda *_: ways(heads)[each])
    left, last = launches(args, kwargs)
    emulate(left)
    got = merged(left, last, args, kwargs.get("v_scale"))
    check_numerics(got, naive(got.dtype, *args, **kwargs), naive(torch.float64, *args, **kwargs), atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "each"),
    [(h, each) for h in (*(HEADS[i] for i in (0, 2, 3, 4, 5, 13, 14, 16)), *FRONTIERS[:3]) for each in ways(h)],
    ids=str,
)
def test_the_same_bits_in_any_number_of_blocks(
    heads: tuple[int, int, int, int], each: str, emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [330, 0, 64, *[0] * 31, 100]
    args, kwargs = made(heads, lengths, "cpu", page_size=16)
    monkeypatch.setattr(_attention, "spread", lambda *_: ways(heads)[each])
    expected: tuple[Tensor, ...] | None = None
    for sms in (132, 3, 1):
        left, _ = launches(args, kwargs, sms)
        emulate(left)
        got = (left["partial"], left["stats"])
        expected = expected or got
        for one, two in zip(got, expected):
            assert_same_bits(one, two)


@pytest.mark.parametrize(("heads", "longest"), [((512, 1, 16, 1), 1100), ((512, 4, 4, 2), 600)], ids=str)
def test_two_folds_are_those_that_the_merge_makes(
    heads: tuple[int, int, int, int], longest: int, emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours, by the arithmetic of triton_ops/_attention_merge.py."""
    args, kwargs = made(heads, [longest, 513, 64, 0], "cpu", page_size=16)
    left = {}
    for each, way in ways(heads).items():
        monkeypatch.setattr(_attention, "spread", lambda *_, way=way: way)
        left[each], _ = launches(args, kwargs)
        emulate(left[each])
    assert left["folds"]["stats"].size(1) == 3 and left["two folds"]["stats"].size(1) == 2
    (tops, totals), averages = left["folds"]["stats"].unbind(2), left["folds"]["partial"]
    for query in range(16):  # of the first request, and a fold that has no partner
        found = [(tops[query, i], totals[query, i], averages[query, i]) for i in range(3)]
        for part, expected in enumerate((folded(*found[0], *found[1]), found[2])):
            assert_same_bits(left["two folds"]["stats"][query, part], torch.stack(expected[:2]))
            assert_same_bits(left["two folds"]["partial"][query, part], expected[2])


@pytest.mark.parametrize("heads", FRONTIERS[:2], ids=str)
def test_a_frontier_folds_as_the_merge_does(
    heads: tuple[int, int, int, int], emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks in their order, by the arithmetic of triton_ops/_attention_merge.py."""
    args, kwargs = made(heads, [1200, 130], "cpu", page_size=16)
    left = {}
    for each, way in ways(heads).items():
        monkeypatch.setattr(_attention, "spread", lambda *_, way=way: way)
        left[each], _ = launches(args, kwargs)
        emulate(left[each])
    chunks, folds = left["chunks"], next(one for each, one in left.items() if "folds" in each)
    fold = folds["chunks_a_part"]
    assert chunks["stats"].size(1) == 10 and folds["stats"].size(1) == -(-10 // fold) > 1
    if "chunks, shared" in left:
        for name in ("partial", "stats"):
            assert_same_bits(left["chunks, shared"][name], chunks[name])
    for query in range(0, heads[1] * heads[2], 5):
        for part in range(folds["stats"].size(1)):
            found = [(*chunks["stats"][query, i], chunks["partial"][query, i])
                     for i in range(part * fold, min((part + 1) * fold, 10))]
            top, total, y = found[0]
            for more in found[1:]:
                top, total, y = folded(top, total, y, *more)
            assert_same_bits(folds["stats"][query, part], torch.stack((top, total)))
            assert_same_bits(folds["partial"][query, part], y)


def folded(
    top: Tensor, total: Tensor, y: Tensor, more_top: Tensor, more_total: Tensor, more_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Two parts: sums and averages as fp32 has them, a product and sum rounded once."""
    exp2 = ctypes.CDLL("libm.so.6").exp2f  # as the emulated kernel's
    exp2.restype, exp2.argtypes = ctypes.c_float, [ctypes.c_float]
    best = torch.maximum(top, more_top)
    shrink, more_shrink = (exp2(float(one - best)) for one in (top, more_top))
    total, y = ((one.double() * shrink + (more * more_shrink).double()).float()
                for one, more in ((total, more_total), (y, more_y)))
    return best, total, y
