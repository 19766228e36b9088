"""draft_attention over many keys: how a kernel divides them among its programs must show in no bit and no error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import FP8, OP, check_call, close, each_implementation, everywhere, options, problem
from harness import FLOATS, assert_same_bits, call, forced, implementations
from torch import Tensor

HEADS: dict[str, Any] = {"heads": (2, 1), "rows": 1}
# Around the ends of chunks of 16 and 32 keys, and of folds of 2 and 8 of them: how the Triton kernel divides few keys.
EDGES = [0, 1, 16, 17, 32, 65, 128, 129, 257]


def comparison(implementation: str) -> Callable[[Tensor, Tensor], None]:
    return close if implementation == "reference" else assert_same_bits


@everywhere
@each_implementation
@pytest.mark.parametrize("page_size", [16, 7])
def test_many_keys(device: str, implementation: str, page_size: int) -> None:
    lengths = [700, 31, 0, 33, 64]
    extra = options(len(lengths), 1, device=device)
    for window_left in (-1, 500):
        check_call(*problem(lengths, page_size=page_size, window_left=window_left, device=device, **HEADS, **extra),
                   implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("length", [1, 32, 33, 300])
@pytest.mark.parametrize("window_left", [-1, 255])
def test_the_width_of_the_table_changes_no_bit(device: str, implementation: str, length: int, window_left: int) -> None:
    """From a table without room for a second split to one with room for many; flat ones as well, and a promise."""
    args, kwargs = problem([length], page_size=16, window_left=window_left, device=device, **HEADS)
    *before, table, seq_lens, scale = args
    pages, same = -(-length // 16), comparison(implementation)
    with forced(implementation):
        expected = call(OP, *before, table[:, :pages].contiguous(), seq_lens, scale, **kwargs)
        for extra in (1, 200):
            wide = torch.cat([table[:, :pages], table.new_full((1, extra), -1)], 1)
            same(call(OP, *before, wide, seq_lens, scale, **kwargs), expected)
            indptr = torch.tensor([0, pages], dtype=torch.int32, device=device)
            same(call(OP, *before, wide[0], seq_lens, scale, **kwargs, kv_indptr=indptr), expected)
            for promise in (length, 10**9):
                same(call(OP, *before, wide, seq_lens, scale, **kwargs, max_seq_len=promise), expected)


@everywhere
@each_implementation
def test_neighbours_with_many_keys_change_no_bit(device: str, implementation: str) -> None:
    lengths = [300, 0, 40, 129]
    same = comparison(implementation)
    args, kwargs = problem(lengths, page_size=16, device=device, **HEADS, **options(4, 1, device=device))
    q, k, v, table, seq_lens, scale = args
    with forced(implementation):
        together = call(OP, *args, **kwargs)
        for b in range(len(lengths)):
            alone: dict[str, Any] = {**kwargs, "positions": kwargs["positions"][b : b + 1]}
            mine: list[Tensor] = [t[b : b + 1] for t in (q, table, seq_lens)]
            same(call(OP, mine[0], k, v, *mine[1:], scale, **alone), together[b : b + 1])


@pytest.mark.kernels_only
@everywhere
@each_implementation
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window_left,fold", [(-1, 8), (-1, 2), (199, 16)])
def test_many_programs_and_few_give_the_same_bits(
    device: str, implementation: str, dtype: torch.dtype, window_left: int, fold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program for each chunk of keys or for several, or for a fold of them or several; none reads poison."""
    args, kwargs = problem(EDGES, page_size=16, dtype=dtype, window_left=window_left, device=device, **HEADS,
                           **options(len(EDGES), 1, device=device))
    expected: Tensor | None = None
    for way in ((1, 1), (fold, 1), (1, 3), (fold, 2)):
        ran = plans_of_triton(monkeypatch, implementation, lambda _, way=way: way, fold=fold)
        got = check_call(args, kwargs, implementation)
        expected = got if expected is None else expected
        assert_same_bits(got, expected)
        if implementation == "triton":
            assert ran[0][0] == way[0] and 1 <= ran[0][1] <= way[1]


@pytest.mark.kernels_only
@everywhere
@each_implementation
def test_neighbours_that_take_programs_change_no_bit(
    device: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together the requests run in folds, alone in chunks; nor does the table's width show."""
    lengths = [300, 0, 40, 129]
    args, kwargs = problem(lengths, page_size=16, device=device, **HEADS, **options(4, 1, device=device))
    q, k, v, table, seq_lens, scale = args
    plans = plans_of_triton(monkeypatch, implementation, lambda blocks: (8, 1) if blocks > 1 else (1, 2))
    with forced(implementation):
        together = call(OP, *args, **kwargs)
        for b, length in enumerate(lengths):
            alone: dict[str, Any] = {**kwargs, "positions": kwargs["positions"][b : b + 1]}
            for pages in (-(-length // 16), table.size(1)):
                mine = [q[b : b + 1], k, v, table[b : b + 1, :pages], seq_lens[b : b + 1], scale]
                assert_same_bits(call(OP, *mine, **alone), together[b : b + 1])
    if implementation == "triton":
        assert plans[0][0] == 8 and {chunks for chunks, _ in plans[1:]} == {1}


@pytest.mark.kernels_only
@everywhere
@each_implementation
@pytest.mark.parametrize(("length", "folds"), [(5 * 32, 8), (20 * 32, 16)])
def test_the_tile_of_a_merge_changes_no_bit(
    device: str, implementation: str, length: int, folds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folds of 32 keys side by side in a tile or one behind the other in each thread, in tiles of more or fewer folds
    than there are."""
    lengths = [length - 5, 0, 1, 70]
    args, kwargs = problem(lengths, page_size=16, device=device, **HEADS, **options(4, 1, device=device))
    expected: Tensor | None = None
    for wide, group in ((False, 0), (True, 0), (False, 16), (True, 16)):
        plans_of_triton(monkeypatch, implementation, lambda _: (1, 1), fold=2, chunk_weight=0.125, max_chunks=64,
                        block_n=16)
        merges = tiles_of_merges(monkeypatch, implementation, wide, group)
        got = check_call(args, kwargs, implementation)
        expected = got if expected is None else expected
        assert_same_bits(got, expected)
        if implementation == "triton":
            assert [(one["GROUP"], one["WIDE"]) for one in merges] == [(group or folds, wide)]


def tiles_of_merges(
    monkeypatch: pytest.MonkeyPatch, implementation: str, wide: bool, group: int
) -> list[dict[str, int | bool]]:
    """The Triton merges in these tiles, which the list gets of each call; a group of 0 is the plan's own."""
    made: list[dict[str, int | bool]] = []
    if implementation == "triton":
        from mtp_kernels.triton_ops import draft_attention as triton

        tile = triton._merge_tile

        def chosen(*args: int) -> tuple[dict[str, int | bool], int]:
            constants, _ = tile(*args)
            constants |= {"WIDE": wide, "GROUP": group or constants["GROUP"]}
            made.append(constants)
            return constants, 1

        monkeypatch.setattr(triton, "_merge_tile", chosen)
    return made


def plans_of_triton(
    monkeypatch: pytest.MonkeyPatch, implementation: str, way: Callable[[int], tuple[int, int]], **sizes: int
) -> list[tuple[int, int]]:
    """The Triton kernel with these sizes in its Config, and `way` (of the number of requests and KV heads) for the
    chunks of a part and the parts of a program at most, which the list gets of each call."""
    made: list[tuple[int, int]] = []
    if implementation == "triton":
        from mtp_kernels.triton_ops import draft_attention as triton

        monkeypatch.undo()  # what an earlier call of this test set
        config, plan = triton.config, triton.plan

        def spy(*args: Any, **kwargs: Any) -> Any:
            launches, output = plan(*args, **kwargs)
            made.extend((launch.constants["CHUNKS"], launch.args["run"]) for launch in launches[:1])
            return launches, output

        def spread(blocks: int, chunks: int, *_: Any) -> tuple[int, int]:
            chunks_a_part, run = way(blocks)
            return chunks_a_part, min(run, -(-chunks // chunks_a_part))

        monkeypatch.setattr(triton, "spread", spread)
        monkeypatch.setattr(triton, "config", lambda *args: replace(config(*args), **sizes))
        monkeypatch.setattr(triton, "plan", spy)
    return made


@everywhere
@each_implementation
@pytest.mark.parametrize("rows,heads", [(1, (32, 1)), (5, (48, 2)), (40, (2, 1)), (3, (3, 1))])
def test_more_queries_than_a_tile_holds(device: str, implementation: str, rows: int, heads: tuple[int, int]) -> None:
    check_call(*problem([70], rows=rows, heads=heads, page_size=16, device=device, **options(1, rows, device=device)),
               implementation)


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])  # runs on one thread
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window_left", [-1, 511])
def test_the_number_of_threads_changes_no_bit(implementation: str, dtype: torch.dtype, window_left: int) -> None:
    """Work enough for several threads, which finish the splits in any order."""
    args, kwargs = problem([2000, 3, 0, 513], page_size=16, rows=3, heads=(4, 2), head_dim=256, dtype=dtype,
                           window_left=window_left, **options(4, 3, 256))
    before = torch.get_num_threads()
    try:
        with forced(implementation):
            torch.set_num_threads(1)
            expected = call(OP, *args, **kwargs)
            torch.set_num_threads(2)
            for _ in range(5):
                assert_same_bits(call(OP, *args, **kwargs), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])  # takes powers of two
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [2, 18, 34, 50, 66, 80])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_that_fill_no_vector(implementation: str, dtype: torch.dtype, head_dim: int, fp8: bool) -> None:
    scales: dict[str, Any] = {"kv_dtype": FP8, "k_scale": torch.tensor(0.5), "v_scale": torch.tensor([2.0, 0.3])}
    extra = {**options(2, 3, head_dim), **(scales if fp8 else {})}
    for heads in ((2, 2), (10, 2)):
        check_call(*problem([37, 150], rows=3, heads=heads, head_dim=head_dim, dtype=dtype, **extra), implementation)
