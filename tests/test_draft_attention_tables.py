"""draft_attention: which keys are visible, and what tables, layouts, strides and ids may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    FP8,
    HEAD_DIM,
    LAYOUTS,
    OP,
    close,
    each_implementation,
    everywhere,
    move,
    options,
    problem,
)
from harness import (
    FLOATS,
    assert_same_bits,
    call,
    forced,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_kernels.reference import draft_attention as reference_module


@everywhere
@each_implementation
@pytest.mark.parametrize("window_left", [-1, 0, 1, 9])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_visible_set_is_exact(device: str, implementation: str, window_left: int, page_size: int) -> None:
    """Equal scores over a one-hot V: the result is 1/count at each visible key and 0 elsewhere."""
    window = 9
    lengths = [0, 1, window - 1, window, window + 1, window + 2, 3 * window]
    args, kwargs = problem(lengths, page_size=page_size, window_left=window_left, rows=1, heads=(1, 1), device=device)
    q, k, v, table, seq_lens, _ = args
    for b, n in enumerate(lengths):
        for key in range(n):
            page = int(table[b, key // page_size])
            if 0 <= page < k.size(0) and not v[page, key % page_size].isnan().any():
                v[page, key % page_size] = F.one_hot(torch.tensor(key), HEAD_DIM)
    with forced(implementation):
        got = call(OP, torch.zeros_like(q), k, v, table, seq_lens, 1.0, **kwargs)
    for b, n in enumerate(lengths):
        count = n if window_left < 0 else min(n, window_left + 1)
        want = torch.zeros(HEAD_DIM, device=device)
        want[n - count : n] = 1 / max(1, count)
        assert torch.equal(got[b, 0, 0] > 0, want > 0)
        torch.testing.assert_close(got[b, 0, 0], want, rtol=1e-6, atol=0)


@everywhere
@each_implementation
@pytest.mark.parametrize("kv_dtype", [*FLOATS, FP8])
def test_what_invisible_slots_hold_changes_no_bit(device: str, implementation: str, kv_dtype: torch.dtype) -> None:
    one = torch.ones(1, device=device)
    results = []
    for poison in (torch.nan, 0.0, 400.0):
        args, kwargs = problem([13, 0, 7], window_left=5, kv_dtype=kv_dtype, poison=poison, device=device,
                               dtype=torch.float32 if kv_dtype == FP8 else kv_dtype, k_scale=one, v_scale=one)
        with forced(implementation):
            results.append(call(OP, *args, **kwargs))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])
    assert (results[0][1] == 0).all() and not results[0][1].signbit().any()


@everywhere
@each_implementation
def test_nothing_to_see_gives_zeros(device: str, implementation: str) -> None:
    """No request, no row, no page, no slot, no table entry, an empty flat table, a promise of 0, lengths of 0."""
    def run(batch: int = 2, rows: int = 1, cache: tuple[int, int] = (3, 4), table: tuple[int, ...] = (2, 5),
            n: int = 0, **more: Any) -> Tensor:
        q = torch.full((batch, rows, 2, HEAD_DIM), torch.nan, device=device)
        k = torch.full((*cache, 1, HEAD_DIM), torch.nan, device=device)
        with forced(implementation):
            return call(OP, q, k, k, torch.full(table, -1, device=device),
                        torch.full((batch,), n, device=device), 1.0, **more)

    assert run(0, table=(0, 5)).shape == (0, 1, 2, HEAD_DIM)
    assert run(rows=0, n=3).shape == (2, 0, 2, HEAD_DIM)
    indptr = torch.zeros(3, dtype=torch.int32, device=device)
    for got in (
        run(), run(n=7, cache=(0, 4)), run(n=7, cache=(3, 0)), run(n=7, table=(2, 0)), run(n=-3),
        run(n=7, table=(0,), kv_indptr=indptr), run(n=7, table=(6,), kv_indptr=indptr), run(max_seq_len=0),
    ):
        assert_same_bits(got, torch.zeros(2, 1, 2, HEAD_DIM, device=device))


@everywhere
@each_implementation
@pytest.mark.parametrize("window_left", [-1, 7])
def test_max_seq_len_changes_nothing(device: str, implementation: str, window_left: int) -> None:
    lengths = [13, 0, 22]
    for flat in (False, True):
        args, kwargs = problem(lengths, window_left=window_left, flat=flat, device=device)
        with forced(implementation):
            expected = call(OP, *args, **kwargs)
            for bound in (22, 23, 1000):
                got = call(OP, *args, **kwargs, max_seq_len=bound)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_window_over_a_long_table_gathers_little(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    gather = reference_module.gather

    def spy(cache: Tensor, pages: Tensor, *rest: Any) -> Tensor:
        seen.append(pages.numel())
        return gather(cache, pages, *rest)

    monkeypatch.setattr(reference_module, "gather", spy)
    args, kwargs = problem([5000, 3], page_size=16, window_left=6, rows=1, heads=(1, 1), head_dim=2)
    with forced("reference"):
        call(OP, *args, **kwargs)
    assert seen == [14, 14]  # K and V of 7 keys of 2 requests


@everywhere
def test_slices_of_the_batch_do_not_matter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = problem([13, 0, 7, 22, 1], device=device, **options(5, 2, device=device))
    with forced("reference"):
        expected = call(OP, *args, **kwargs)
        monkeypatch.setattr(reference_module, "GATHER", 2 * 30 * 2 * HEAD_DIM)
        torch.testing.assert_close(call(OP, *args, **kwargs), expected, rtol=1e-5, atol=1e-6)


@everywhere
@each_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_give_the_same_bits(device: str, implementation: str, layout: str, flat: bool, dtype: torch.dtype
                                    ) -> None:
    lengths = [13, 0, 7]
    with forced(implementation):
        args, kwargs = problem(lengths, dtype=dtype, device=device, window_left=6)
        expected = call(OP, *args, **kwargs)
        args, kwargs = problem(lengths, dtype=dtype, device=device, window_left=6, layout=layout, flat=flat)
        got = call(OP, *args, **kwargs)
    if flat and implementation != "reference":
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)  # a flat table may be split in another way
    else:
        assert_same_bits(got, expected)


@everywhere
@each_implementation
def test_every_index_may_be_int32_or_int64(device: str, implementation: str) -> None:
    for flat in (False, True):
        extra = options(2, 2, device=device)
        args, kwargs = problem([13, 7], window_left=9, flat=flat, device=device, **extra)
        with forced(implementation):
            expected = call(OP, *args, **kwargs)
            for table in (torch.int32, torch.int64):
                for lengths in (torch.int32, torch.int64):
                    new = (*args[:3], args[3].to(table), args[4].to(lengths), *args[5:])
                    others = {n: t.to(lengths) for n, t in kwargs.items() if n in ("kv_indptr", "positions")}
                    assert_same_bits(call(OP, *new, **{**kwargs, **others}), expected)


@everywhere
@each_implementation
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_page_ids_out_of_range_are_clamped(device: str, implementation: str, dtype: torch.dtype) -> None:
    args, kwargs = problem([13, 22], poison=0.5, device=device)
    q, k, v, table, *rest = args
    far = [2**40, -(2**40), 2**63 - 1, -(2**63)] if dtype == torch.int64 else []
    for bad in (-1, k.size(0), 2**31 - 1, -(2**31), *far):
        wrong = table.to(dtype)
        wrong[:, 1] = bad
        with forced(implementation):
            got = call(OP, q, k, v, wrong, *rest, **kwargs)
            assert_same_bits(got, call(OP, q, k, v, wrong.clamp(0, k.size(0) - 1), *rest, **kwargs))


@everywhere
@each_implementation
@pytest.mark.parametrize("window_left", [-1, 6])
def test_lengths_are_clamped_to_the_table(device: str, implementation: str, window_left: int) -> None:
    for flat, capacity in ((False, 10), (True, 10)):
        args, kwargs = problem([10, 10], window_left=window_left, flat=flat, poison=0.5, device=device)
        q, k, v, table, seq_lens, scale = args
        table = table if flat else table[:, :2]
        for n in (-1, -(2**63), capacity + 1, 2**31 - 1, 2**31 + 3, 2**63 - 1):
            with forced(implementation):
                got = call(OP, q, k, v, table, torch.full_like(seq_lens, n), scale, **kwargs)
                good = torch.full_like(seq_lens, min(max(n, 0), capacity))
                assert_same_bits(got, call(OP, q, k, v, table, good, scale, **kwargs))


@everywhere
@each_implementation
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    indptr=st.lists(st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 7, 2**31 - 1]), min_size=3, max_size=3),
    lengths=st.lists(st.sampled_from([-(2**31), -1, 0, 1, 5, 6, 2**31 - 1]), min_size=2, max_size=2),
    table=st.lists(st.sampled_from([-(2**31), -1, 0, 2, 3, 2**31 - 1]), min_size=0, max_size=4),
    window_left=st.integers(-2, 12),
    flat=st.booleans(),
)
def test_no_index_is_ever_read_out_of_bounds(device: str, implementation: str, indptr: list[int], lengths: list[int],
                                             table: list[int], window_left: int, flat: bool) -> None:
    """Whatever the indices hold, the result is an average of values that are in the cache, or zero."""
    k = torch.ones(3, 5, 1, HEAD_DIM, device=device)
    pages = torch.tensor(table, dtype=torch.int32, device=device)
    extra = {"kv_indptr": torch.tensor(indptr, dtype=torch.int32, device=device)} if flat else {}
    with forced(implementation):
        got = call(OP, torch.ones(2, 1, 2, HEAD_DIM, device=device), k, k,
                   pages if flat else pages.expand(2, -1).contiguous(),
                   torch.tensor(lengths, dtype=torch.int32, device=device), 1.0, window_left=window_left, **extra)
    ones = (got - 1).abs() < 1e-5
    assert (ones | (got == 0)).all()
    if not flat:
        assert ones.all(-1).all(-1).flatten().tolist() == [n > 0 and len(table) > 0 for n in lengths]


@everywhere
@each_implementation
@pytest.mark.parametrize("window_left", [-1, 3])
def test_page_offsets_beyond_32_bits(device: str, implementation: str, window_left: int) -> None:
    """Page id * stride passes 2^31 at page 1 (what lies between the pages is never touched, so it takes no memory)."""
    stride = 2**31 + 256
    backing = torch.empty(stride + 4096, dtype=torch.uint8, device=device).view(FP8)
    shape, strides = (2, 4, 1, HEAD_DIM), (stride, HEAD_DIM, HEAD_DIM, 1)
    k, v = backing.as_strided(shape, strides), backing.as_strided(shape, strides, 1024)
    args, kwargs = problem([8], page_size=4, heads=(2, 1), kv_dtype=FP8, window_left=window_left, spare_pages=0,
                           k_scale=torch.ones(1), v_scale=torch.ones(1))
    args, kwargs = move(args, device), {name: move(value, device) for name, value in kwargs.items()}
    small_k, small_v = args[1:3]
    for page in range(2):
        k.view(torch.uint8)[page] = small_k[page].view(torch.uint8)
        v.view(torch.uint8)[page] = small_v[page].view(torch.uint8)
    with forced(implementation):
        assert_same_bits(call(OP, args[0], k, v, *args[3:], **kwargs), call(OP, *args, **kwargs))


@everywhere
@each_implementation
def test_swapped_tables_change_the_result(device: str, implementation: str) -> None:
    args, kwargs = problem([10, 10], poison=0.5, device=device)
    q, k, v, table, *rest = args
    with forced(implementation):
        one, two = call(OP, *args, **kwargs), call(OP, q, k, v, table.flip(0), *rest, **kwargs)
    assert (one - two).abs().flatten(1).amax(1).min() > 0.1


@everywhere
@each_implementation
@pytest.mark.parametrize("window_left", [-1, 6])
def test_a_batch_equals_each_request_alone(device: str, implementation: str, window_left: int) -> None:
    """Neighbours, order, table width and the other rows change nothing: kernels give the same bits."""
    lengths = [13, 0, 7, 22]
    extra = options(4, 3, device=device)
    args, kwargs = problem(lengths, rows=3, window_left=window_left, device=device, **extra)
    q, k, v, table, seq_lens, scale = args
    same = close if implementation == "reference" else assert_same_bits
    with forced(implementation):
        together = call(OP, *args, **kwargs)
        flipped = {**kwargs, "positions": kwargs["positions"].flip(0)}
        same(call(OP, q.flip(0), k, v, table.flip(0), seq_lens.flip(0), scale, **flipped).flip(0), together)
        wide = torch.cat([table, torch.full_like(table, -1)], 1)
        same(call(OP, q, k, v, wide, seq_lens, scale, **kwargs), together)
        for b in range(4):
            one = slice(b, b + 1)
            alone = {**kwargs, "positions": kwargs["positions"][one]}
            narrow = table[one, : max(1, -(-lengths[b] // 5))]
            same(call(OP, q[one], k, v, narrow, seq_lens[one], scale, **alone), together[one])
        for row in range(3):  # across different numbers of rows the bits may differ
            alone = {**kwargs, "positions": kwargs["positions"][:, row : row + 1]}
            close(call(OP, q[:, row : row + 1], k, v, table, seq_lens, scale, **alone), together[:, row : row + 1])
