"""draft_attention against fp64 and a loop over keys; what is visible, layouts, fp8, RoPE, bad ids, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    DEVICES,
    FLOATS,
    assert_same_bits,
    call,
    check_debug_error,
    check_error,
    check_everything,
    check_numerics,
    forced,
    implementations,
    random_tensor,
    to64,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mtp_kernels
from mtp_kernels.reference import draft_attention as reference_module
from mtp_kernels.reference.draft_attention import draft_attention as reference

OP = "draft_attention"
FP8 = torch.float8_e4m3fn
HEAD_DIM = 64
LAYOUTS = ["NHD", "HND", "pages-2", "2-pages", "K NHD, V HND"]
GARBAGE = [-1, 2**31 - 1, -(2**31), 10**6]

Call = tuple[tuple[Any, ...], dict[str, Any]]


def lay_out(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """K and V [num_pages, page_size, heads, dim] as views of caches that are kept in another order."""
    if layout == "pages-2":
        return torch.stack([k, v], 1).unbind(1)
    if layout == "2-pages":
        return torch.stack([k, v]).unbind()
    hnd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    return {"NHD": (k, v), "HND": (hnd[0], hnd[1]), "K NHD, V HND": (k, hnd[1])}[layout]


def problem(
    lengths: list[int],
    *,
    rows: int = 2,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = HEAD_DIM,
    page_size: int = 5,
    window_left: int = -1,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    flat: bool = False,
    spare_pages: int = 2,
    device: str = "cpu",
    seed: int = 0,
    poison: float = torch.nan,
    **options: Any,
) -> Call:
    """A call whose invisible slots hold NaN and whose table is garbage wherever no key is visible."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in lengths]
    width = max(pages, default=0) + 1
    num_pages = sum(pages) + spare_pages
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.tensor(GARBAGE, dtype=torch.int64).repeat(len(lengths), width)[:, :width].clone()
    shape = (num_pages, page_size, heads[1], head_dim)
    k, v = (random_tensor(*shape, seed=seed + i).to(kv_dtype or dtype) for i in (1, 2))
    seen = torch.zeros(num_pages, page_size, dtype=torch.bool)
    for b, n in enumerate(lengths):
        first = 0 if window_left < 0 else max(0, n - window_left - 1)
        mine = [order.pop() for _ in range(pages[b])]
        for key in range(first, n):
            table[b, key // page_size] = mine[key // page_size]
            seen[mine[key // page_size], key % page_size] = True
    invisible = ~seen[:, :, None, None].expand(shape)
    k, v = (torch.where(invisible, torch.full_like(t, poison), t) for t in (k, v))
    k, v = lay_out(k.to(device), v.to(device), layout)
    if flat:
        table = torch.cat([table[b, : pages[b]] for b in range(len(lengths))] + [torch.tensor(GARBAGE)])
        options["kv_indptr"] = torch.tensor([0, *pages]).cumsum(0).to(device)
    q = random_tensor(len(lengths), rows, heads[0], head_dim, seed=seed + 3, dtype=dtype, device=device)
    args = (q, k, v, table.int().to(device), torch.tensor(lengths, dtype=torch.int64, device=device), head_dim**-0.5)
    return args, {"window_left": window_left, **options}


def options(batch: int, rows: int, head_dim: int = HEAD_DIM, device: str = "cpu") -> dict[str, Any]:
    """q-norm, RoPE of three quarters of the pairs, and a soft cap small enough to matter."""
    pairs = head_dim * 3 // 8
    return {
        "q_norm_weight": random_tensor(head_dim, seed=11, device=device, scale=0.3) + 1,
        "rope_inv_freq": inv_freq(pairs, head_dim).to(device),
        "positions": torch.arange(batch * rows, device=device).view(batch, rows) * 37 + 5,
        "logits_soft_cap": 0.7,
    }


def inv_freq(pairs: int, head_dim: int = HEAD_DIM) -> Tensor:
    return 1.0 / 10000 ** (torch.arange(pairs, dtype=torch.float64) * 2 / head_dim).float()


def naive(
    dtype: torch.dtype,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    kv_indptr: Tensor | None = None,
    max_seq_len: int = -1,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    q_norm_eps: float = 1e-6,
    rope_inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The formula in `dtype` throughout, request by request and key by key."""
    x = q.to(dtype)
    if q_norm_weight is not None:
        x = F.rms_norm(x, (x.size(-1),), q_norm_weight.to(dtype), q_norm_eps)
    if rope_inv_freq is not None and positions is not None:
        x = turn(x, positions, rope_inv_freq)
    page_size, group = k_cache.size(1), q.size(2) // k_cache.size(2)
    output = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for b, n in enumerate(seq_lens.tolist()):
        first = 0 if window_left < 0 else max(0, n - window_left - 1)
        begin = 0 if kv_indptr is None else int(kv_indptr[b])
        table = block_table[b] if kv_indptr is None else block_table[begin:]
        if n == first:
            continue
        places = [(int(table[key // page_size]), key % page_size) for key in range(first, n)]
        k, v = (torch.stack([cache[page, slot].to(dtype) for page, slot in places]) for cache in (k_cache, v_cache))
        k = k if k_scale is None else k * k_scale.to(dtype).view(-1, 1)
        v = v if v_scale is None else v * v_scale.to(dtype).view(-1, 1)
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # [keys, num_qo_heads, head_dim]
        scores = torch.einsum("rhd,nhd->hrn", x[b], k) * sm_scale
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        output[b] = torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v)
    return output


def turn(x: Tensor, positions: Tensor, freqs: Tensor, sine_dtype: torch.dtype | None = None) -> Tensor:
    """RoPE pair by pair; the angle is the fp32 product (see the reference), its sine fp64 for fp64."""
    half = x.size(-1) // 2
    y = x.clone()
    positions = positions if positions.dim() == 2 else positions.unsqueeze(1)
    for i, freq in enumerate(freqs):
        angle = (positions.float() * freq).unsqueeze(2)  # [batch, rows or 1, 1]
        angle = angle.double() if x.dtype == torch.float64 else angle
        cos, sin = (t.to(sine_dtype or x.dtype).to(x.dtype) for t in (angle.cos(), angle.sin()))
        y[..., i] = x[..., i] * cos - x[..., i + half] * sin
        y[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return y


def check_call(args: tuple[Any, ...], kwargs: dict[str, Any], implementation: str = "reference") -> Tensor:
    """The op's result, once it is as near to fp64 as plain PyTorch of the same dtype."""
    with forced(implementation):
        got = call(OP, *args, **kwargs)
    check_numerics(got, naive(got.dtype, *args, **kwargs), naive(torch.float64, *args, **kwargs), atol=1e-6)
    return got


everywhere = pytest.mark.parametrize("device", DEVICES)
each_implementation = pytest.mark.parametrize("implementation", implementations(OP))


@everywhere
@each_implementation
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize("lengths", [[1], [13, 0, 7, 22], [0, 0], []])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, window_left: int, lengths: list[int]
                      ) -> None:
    extra = options(len(lengths), 2, device=device)
    for more in ({}, extra):
        check_call(*problem(lengths, dtype=dtype, window_left=window_left, device=device, **more), implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (16, 1)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(device: str, implementation: str, heads: tuple[int, int], rows: int, head_dim: int) -> None:
    check_call(*problem([9, 4], rows=rows, heads=heads, head_dim=head_dim, device=device), implementation)


@pytest.mark.parametrize("head_dim", [2, 6, 50])
def test_reference_takes_any_even_head_dim(head_dim: int) -> None:
    check_call(*problem([9, 4], head_dim=head_dim, **options(2, 2, head_dim)))


def test_reference_computes_in_fp64_for_fp64() -> None:
    args, kwargs = problem([13, 0, 7], window_left=8, flat=True, **options(3, 2))
    got = reference(*map(to64, args), **{name: to64(value) for name, value in kwargs.items()})
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, naive(torch.float64, *args, **kwargs), rtol=0, atol=1e-13)


@everywhere
@each_implementation
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 2, 5, 16]),
    window_left=st.integers(-1, 45),
    flat=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)
def test_any_table(device: str, implementation: str, lengths: list[int], page_size: int, window_left: int, flat: bool,
                   layout: str, seed: int) -> None:
    check_call(*problem(lengths, page_size=page_size, window_left=window_left, flat=flat, layout=layout, seed=seed,
                        rows=1, heads=(2, 1), device=device), implementation)


@everywhere
@pytest.mark.parametrize("case", ["table", "flat", "fp8"])
def test_contract(device: str, case: str) -> None:
    lengths = [7, 0, 12]
    extra = options(3, 2, 16, device)
    if case == "fp8":
        scale = torch.tensor([0.5, 0.25], device=device)
        extra |= {"kv_dtype": FP8, "k_scale": scale, "v_scale": scale[0]}
    args, kwargs = problem(lengths, head_dim=16, window_left=8, flat=case == "flat", poison=0.0, device=device, **extra)
    args[3].clamp_(0, 1)  # these checks also run with MTP_DEBUG=1
    check_everything(OP, *args, **kwargs)


# What is visible


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
    call(OP, *args, **kwargs)
    assert seen == [14, 14]  # K and V of 7 keys of 2 requests


@everywhere
def test_slices_of_the_batch_do_not_matter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = problem([13, 0, 7, 22, 1], device=device, **options(5, 2, device=device))
    expected = call(OP, *args, **kwargs)
    monkeypatch.setattr(reference_module, "GATHER", 2 * 30 * 2 * HEAD_DIM)
    torch.testing.assert_close(call(OP, *args, **kwargs), expected, rtol=1e-5, atol=1e-6)


# Caches and tables


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


def move(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(move(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


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
    """Neighbours, order, table width and the other rows change nothing: kernels give the same bits (DESIGN 7)."""
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


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Scales, norm, RoPE, soft cap


@everywhere
@each_implementation
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_equals_the_dequantised_cache(device: str, implementation: str, shape: tuple[int, ...], dtype: torch.dtype
                                          ) -> None:
    """Calibrated scales are far from 1: K and V of order 1 kept as fp8 of order 100."""
    k_scale, v_scale = (torch.full(shape, s, device=device) for s in (0.003, 0.004))
    if shape == (2,):
        k_scale[1], v_scale[1] = 0.009, 0.001
    args, kwargs = problem([13, 0, 7], kv_dtype=FP8, dtype=dtype, window_left=9, device=device)
    q, k, v, *rest = args
    k, v = ((t.float() * 100).to(FP8) for t in (k, v))
    got = check_call((q, k, v, *rest), {**kwargs, "k_scale": k_scale, "v_scale": v_scale}, implementation)
    dequantised = [(t.double() * s.double().view(-1, 1)) for t, s in ((k, k_scale), (v, v_scale))]
    exact = naive(torch.float64, q, *dequantised, *rest, **kwargs)
    check_numerics(got, exact.to(dtype), exact, atol=1e-6)
    one = torch.ones_like(k_scale)
    with forced(implementation):  # the fault this guards against is silent: scales of 1 give other, finite results
        wrong = call(OP, q, k, v, *rest, **kwargs, k_scale=one, v_scale=v_scale)
    assert torch.isfinite(wrong).all() and (wrong - got).abs().max() > 0.05


@everywhere
@each_implementation
def test_scales_apply_to_any_cache(device: str, implementation: str) -> None:
    for scales in ({"k_scale": torch.tensor(0.5, device=device)}, {"v_scale": torch.tensor([2.0, 3.0], device=device)}):
        check_call(*problem([13, 7], device=device, **scales), implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
def test_q_norm(device: str, implementation: str, norm_dtype: torch.dtype) -> None:
    weight = random_tensor(HEAD_DIM, seed=5, dtype=norm_dtype, device=device)
    for eps in (1e-6, 0.5):
        check_call(*problem([13, 7], dtype=torch.bfloat16, device=device, q_norm_weight=weight, q_norm_eps=eps),
                   implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("cap", [0.3, 5.0])
def test_soft_cap(device: str, implementation: str, cap: float) -> None:
    args, kwargs = problem([13, 7], window_left=9, device=device)
    args = (args[0] * 5, *args[1:])
    got = check_call(args, {**kwargs, "logits_soft_cap": cap}, implementation)
    with forced(implementation):
        assert (got - call(OP, *args, **kwargs)).abs().max() > 0.1


@everywhere
@each_implementation
@pytest.mark.parametrize("pairs", [0, 1, 8, 32])
@pytest.mark.parametrize("each_row", [False, True])
def test_rope(device: str, implementation: str, pairs: int, each_row: bool) -> None:
    positions = torch.tensor([[0, 1, 2], [700, 40000, 262143]], device=device)
    check_call(*problem([13, 7], rows=3, device=device, rope_inv_freq=inv_freq(pairs).to(device),
                        positions=positions if each_row else positions[:, 1].contiguous()), implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("position", [262143, 999983, 2**24 - 1])
def test_rope_far_out(device: str, implementation: str, position: int) -> None:
    """Full fp32 sine at large angles: frequencies are powers of two, so the fp32 angle is exact and fp64 may judge.

    A sine kept in bf16 or fp16, or of an angle reduced in bf16, is shown to fail the same bound.
    """
    freqs = (2.0 ** -torch.arange(32)).to(device)
    args, kwargs = problem([9], rows=1, device=device)
    args = (args[0] * 4, *args[1:])  # sharp scores, so that an error in the angle shows
    kwargs |= {"rope_inv_freq": freqs, "positions": torch.tensor([position], device=device)}
    angle = torch.tensor(position, dtype=torch.float64) * freqs.cpu().double()
    assert torch.equal(angle.float().double(), angle)
    check_call(args, kwargs, implementation)
    plain = {"window_left": -1}
    exact = naive(torch.float64, *args, **kwargs)
    for sine_dtype in (torch.bfloat16, torch.float16):
        turned = turn(args[0].double(), kwargs["positions"], freqs, sine_dtype)
        low = naive(torch.float64, turned, *args[1:], **plain).float()
        with pytest.raises(AssertionError, match="error"):
            check_numerics(low, naive(torch.float32, *args, **kwargs), exact, atol=1e-6)


@everywhere
@each_implementation
def test_rope_angle_is_the_rounded_product(device: str, implementation: str) -> None:
    """Real frequencies: against the unrounded angle the result is off by what rounding the product explains, no more.

    One pair turns, and of two keys one is a quarter turn ahead of the unrounded angle, the other opposite to it: the
    result is sigmoid(2 * sin(error of the angle)), about 1/2 + error / 2.
    """
    freqs, position = inv_freq(32), torch.tensor([262143])
    unrounded, rounded = position.double() * freqs.double(), (position.float() * freqs).double()
    i = int((rounded - unrounded).abs().argmax())
    q, key = torch.zeros(1, 1, 1, HEAD_DIM), torch.zeros(HEAD_DIM)
    q[..., i] = 1
    key[i], key[i + 32] = -unrounded[i].sin(), unrounded[i].cos()
    k = torch.stack([key, -key]).view(1, 2, 1, HEAD_DIM)
    v = torch.stack([torch.ones(HEAD_DIM), torch.zeros(HEAD_DIM)]).view(1, 2, 1, HEAD_DIM)
    args = (q, k, v, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]), 1.0)
    with forced(implementation):
        got = call(OP, *move(args, device), rope_inv_freq=freqs.to(device), positions=position.to(device))
    error = float(rounded[i] - unrounded[i])
    assert 2**-9 < abs(error) < 2**-7  # the definition has to say which angle is meant
    assert abs(got[0, 0, 0, 0].item() - torch.tensor(2 * error).sin().sigmoid().item()) < 1e-6


@everywhere
@each_implementation
def test_rope_pairs_are_half_a_head_apart(device: str, implementation: str) -> None:
    """A quarter turn of pair 0 moves q[0] to q[head_dim / 2]: seen by a key that has only that coordinate."""
    q = torch.zeros(1, 1, 1, HEAD_DIM, device=device)
    q[..., 0] = 1
    k = torch.zeros(1, 2, 1, HEAD_DIM, device=device)
    k[0, 0, 0, HEAD_DIM // 2] = 100
    v = torch.zeros_like(k)
    v[0, 0] = 1
    quarter = torch.tensor([torch.pi / 2], device=device)
    with forced(implementation):
        got = call(OP, q, k, v, torch.zeros(1, 1, dtype=torch.int64, device=device),
                   torch.tensor([2], device=device), 1.0, rope_inv_freq=quarter,
                   positions=torch.tensor([1], device=device))
    torch.testing.assert_close(got, torch.ones_like(got))


# Interface


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_implementation
def test_cuda_graph(implementation: str) -> None:
    """Captured without a synchronisation; replays see new lengths, tables and queries."""
    extra = options(3, 2, device="cuda")
    args, kwargs = problem([13, 0, 7], device="cuda", poison=0.5, **extra)
    q, _, _, table, seq_lens, _ = args
    with forced(implementation):
        call(OP, *args, **kwargs)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                captured = call(OP, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        table.copy_(table.flip(0))
        seq_lens.copy_(seq_lens.flip(0))
        q.mul_(0.5)
        graph.replay()
        assert_same_bits(captured, call(OP, *args, **kwargs))


def test_supports() -> None:
    good = {"head_dim": 512, "num_qo_heads": 16, "num_kv_heads": 2, "page_size": 64, "kv_dtype": FP8}
    assert mtp_kernels.supports(OP, dtype=torch.bfloat16, **good) == (True, "")
    for change, reason in (
        ({"head_dim": 63}, "head_dim 63 is not even"),
        ({"num_kv_heads": 3}, "16 query heads are not a multiple of 3 KV heads"),
        ({"page_size": 0}, "page_size 0 is not at least 1"),
        ({"kv_dtype": torch.float8_e5m2},
         "kv_dtype float8_e5m2 is not bfloat16 or float16 or float32 or float8_e4m3fn"),
    ):
        assert mtp_kernels.supports(OP, **{**good, **change}) == (False, reason)
    with pytest.raises(mtp_kernels.ArgumentError, match="heads"):
        mtp_kernels.supports(OP, heads=3)


def test_errors() -> None:
    (q, k, v, table, lens, scale), _ = problem([9, 4])
    flat, indptr = table.flatten(), torch.tensor([0, 2, 3])
    fp8, one = k.to(FP8), torch.ones(1)
    freqs, positions = torch.ones(32), torch.tensor([1, 2])

    def bad(message: str, *change: Any, **kwargs: Any) -> None:
        args = [q, k, v, table, lens, scale]
        for i, value in zip(change[::2], change[1::2]):
            args[i] = value
        check_error(OP, f"draft_attention: {message}", *args, **kwargs)

    bad("q: expected 4 dimensions, got 3 ([2, 2, 4])", 0, q[..., 0])
    bad("q: expected bfloat16 or float16 or float32, got float64", 0, q.double())
    bad("q: expected an even head_dim, got 63", 0, q[..., :63])
    bad("q: expected a contiguous last dimension, got strides [512, 256, 1, 4]", 0,
        q.transpose(2, 3).contiguous().transpose(2, 3))
    bad("k_cache: expected [*, *, *, 64], got [5, 5, 2, 62] (head_dim of q is 64)", 1, k[..., :62])
    bad("k_cache: expected [*, *, *, 64], got [5, 5, 64] (head_dim of q is 64)", 1, k[:, :, 0])
    bad("k_cache: expected bfloat16 or float8_e4m3fn, got float32 (q is bfloat16)", 0, q.bfloat16())
    bad("k_cache: expected float32 or float8_e4m3fn, got float8_e5m2 (q is float32)", 1, k.to(torch.float8_e5m2))
    bad("k_cache: expected at least 1 KV head, got 0", 1, k[:, :, :0])
    bad("k_cache: expected a number of KV heads that divides 4, got 3 (q has 4 heads)",
        1, k.new_empty(5, 5, 3, 64), 2, v.new_empty(5, 5, 3, 64))
    bad("k_cache: expected a contiguous last dimension, got strides [640, 128, 1, 2]",
        1, k.transpose(2, 3).contiguous().transpose(2, 3))
    bad("v_cache: expected [5, 5, 2, 64], got [4, 5, 2, 64] (the shape of k_cache)", 2, v[1:])
    bad("v_cache: expected float32, got float16 (k_cache is float32)", 2, v.half())
    bad("k_scale: expected a tensor, got None (k_cache is float8_e4m3fn)", 1, fp8, 2, fp8)
    bad("v_scale: expected a tensor, got None (k_cache is float8_e4m3fn)", 1, fp8, 2, fp8, k_scale=one)
    bad("k_scale: expected one element or [2], got [4] (k_cache has 2 KV heads)", k_scale=torch.ones(4))
    bad("v_scale: expected float32, got bfloat16", v_scale=one.bfloat16())
    bad("block_table: expected [2, *], got [1, 3] (batch of q is 2)", 3, table[:1])
    bad("block_table: expected [2, *], got [6] (batch of q is 2)", 3, flat)
    bad("block_table: expected [*], got [2, 3] (flat beside kv_indptr)", kv_indptr=indptr)
    bad("block_table: expected int32 or int64, got int16", 3, table.short())
    bad("block_table: expected a contiguous last dimension, got strides [1, 2]", 3, table.t().contiguous().t())
    bad("kv_indptr: expected [3], got [2] (batch of q is 2)", 3, flat, kv_indptr=indptr[1:])
    bad("kv_indptr: expected int32 or int64, got float32", 3, flat, kv_indptr=indptr.float())
    bad("seq_lens: expected [2], got [1] (batch of q is 2)", 4, lens[:1])
    bad("seq_lens: expected int32 or int64, got float32", 4, lens.float())
    bad("max_seq_len: expected at least -1, got -2", max_seq_len=-2)
    bad("logits_soft_cap: expected a finite value of at least 0, got -1.0", logits_soft_cap=-1.0)
    bad("logits_soft_cap: expected a finite value of at least 0, got nan", logits_soft_cap=torch.nan)
    bad("q_norm_weight: expected [64], got [1] (head_dim of q is 64)", q_norm_weight=one)
    bad("q_norm_weight: expected float32, got float16 (q is float32)", q_norm_weight=torch.ones(64).half())
    bad("rope_inv_freq: expected a tensor, got None (positions is given)", positions=positions)
    bad("positions: expected a tensor, got None (rope_inv_freq is given)", rope_inv_freq=freqs)
    bad("rope_inv_freq: expected 1 dimensions, got 2 ([1, 32])", rope_inv_freq=freqs[None], positions=positions)
    bad("rope_inv_freq: expected float32, got float16", rope_inv_freq=freqs.half(), positions=positions)
    bad("rope_inv_freq: expected at most 32 pairs, got 33 (head_dim of q is 64)", rope_inv_freq=torch.ones(33),
        positions=positions)
    bad("positions: expected [2] or [2, 2], got [2, 1] (q has batch 2 and 2 rows)", rope_inv_freq=freqs,
        positions=positions[:, None])
    bad("positions: expected int32 or int64, got float32", rope_inv_freq=freqs, positions=positions.float())


def test_errors_name_a_tensor_on_another_device() -> None:
    args, _ = problem([9, 4])
    with pytest.raises(mtp_kernels.ArgumentError) as error:
        call(OP, *args[:3], args[3].to("meta"), *args[4:])
    assert str(error.value) == "draft_attention: block_table: expected cpu, got meta (q is on cpu)"


def test_debug_names_the_first_offender() -> None:
    (q, k, v, table, lens, scale), _ = problem([9, 4], poison=0.0)
    flat, indptr = torch.cat([table[0, :2], table[1, :1]]), torch.tensor([0, 2, 3])

    def bad(message: str, *change: Any, **kwargs: Any) -> None:
        args = [q, k, v, table, lens, scale]
        for i, value in zip(change[::2], change[1::2]):
            args[i] = value
        check_debug_error(OP, f"draft_attention: {message}", *args, **kwargs)

    def but(tensor: Tensor, index: tuple[int, ...] | int, value: float) -> Tensor:
        changed = tensor.clone()
        changed[index] = value
        return changed

    bad("q[1, 0, 3, 7]: expected a finite value, got nan", 0, but(q, (1, 0, 3, 7), torch.nan))
    bad("k_scale: expected a finite value, got inf", k_scale=torch.tensor(torch.inf))
    bad("seq_lens[1]: expected 0 to 15, got 16 (block_table has 3 pages of 5 keys a request)", 4, but(lens, 1, 16))
    bad("seq_lens[0]: expected 0 to 15, got -1 (block_table has 3 pages of 5 keys a request)", 4, but(lens, 0, -1))
    bad("seq_lens[0]: expected 0 to 8, got 9 (max_seq_len is 8)", max_seq_len=8)
    bad("block_table[1, 0]: expected 0 to 4, got 999 (k_cache has 5 pages)", 3, but(table, (1, 0), 999))
    bad("block_table[2]: expected 0 to 4, got -1 (k_cache has 5 pages)", 3, but(flat, 2, -1), kv_indptr=indptr)
    bad("kv_indptr[2]: expected 0 to 3, got 4 (block_table has 3 entries)", 3, flat, kv_indptr=but(indptr, 2, 4))
    bad("kv_indptr[2]: expected at least the value before it, got 1", 3, flat, kv_indptr=but(indptr, 2, 1))
    bad("seq_lens[1]: expected 0 to 5 times the request's pages in kv_indptr, got 6", 3, flat, 4, but(lens, 1, 6),
        kv_indptr=indptr)
    page = int(table[0, 1])
    bad(f"k_cache[{page}, 3, 1, 5]: expected a finite value, got inf (visible to request 0)",
        1, but(k, (page, 3, 1, 5), torch.inf))
    bad(f"v_cache[{page}, 0, 0, 0]: expected a finite value, got nan (visible to request 0)",
        2, but(v, (page, 0, 0, 0), torch.nan))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("window_left", [-1, 0, 6])
def test_debug_accepts_garbage_that_is_not_visible(flat: bool, window_left: int) -> None:
    args, kwargs = problem([0, 13, 7, 0, 22], window_left=window_left, flat=flat)
    expected = call(OP, *args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTP_DEBUG", "1")
        assert_same_bits(call(OP, *args, **kwargs), expected)
