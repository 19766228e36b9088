"""KVView: the same keys kept in every way engines keep them, without a copy; compiled; errors in the caller's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import DEVICES, FLOATS, assert_same_bits, random_tensor
from torch import Tensor

from mtp_kernels import ArgumentError, KVView

BATCH, LENGTH, HEADS, DIM = 3, 12, 2, 16
LENGTHS = [12, 0, 7]
FP8 = torch.float8_e4m3fn

everywhere = pytest.mark.parametrize("device", DEVICES)


def dense_cache(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """transformers' layout: [batch, heads, length, dim]."""
    k, v = (random_tensor(BATCH, HEADS, LENGTH, DIM, seed=s, dtype=dtype, device=device) for s in (1, 2))
    return k, v


def pages_of(k: Tensor, page_size: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """The same keys in shuffled pages [num_pages, page_size, heads, dim], and their table [batch, max_pages]."""
    pages = k.transpose(1, 2).reshape(-1, page_size, HEADS, DIM)
    order = torch.randperm(pages.size(0), generator=torch.Generator().manual_seed(seed)).to(k.device)
    return pages[order.argsort()], order.view(BATCH, -1)


def query(device: str = "cpu", rows: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_tensor(BATCH, rows, 2 * HEADS, DIM, seed=4, dtype=dtype, device=device)


def same_storage(view: Tensor, cache: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


@everywhere
@pytest.mark.parametrize("window_left", [-1, 4])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_every_way_to_keep_the_same_keys(device: str, window_left: int, page_size: int) -> None:
    k, v = dense_cache(device)
    lengths = torch.tensor(LENGTHS, device=device)
    (pk, table), (pv, _) = pages_of(k, page_size), pages_of(v, page_size)
    indptr = torch.arange(BATCH + 1, device=device) * table.size(1)
    hnd = [t.transpose(1, 2).contiguous() for t in (pk, pv)]
    pairs = torch.stack([pk, pv], dim=1)  # [num_pages, 2, page_size, heads, dim]
    views = {
        "dense": KVView.dense(k, v, lengths, window_left),
        "paged": KVView.paged(pk, pv, table, lengths, window_left),
        "HND": KVView.paged(*hnd, table, lengths, window_left, layout="HND"),
        "interleaved": KVView.paged(pairs[:, 0], pairs[:, 1], table, lengths, window_left),
        "ragged": KVView.ragged(pk, pv, indptr, table.flatten(), lengths, window_left, max_seq_len=LENGTH),
        "ragged HND": KVView.ragged(*hnd, indptr, table.flatten(), lengths, window_left, layout="HND"),
    }
    if page_size == 1:
        views["token pool"] = KVView.ragged(pk[:, 0], pv[:, 0], indptr, table.flatten(), lengths, window_left)
    expected = views["dense"].attend(query(device), 0.5)
    assert (expected[1] == 0).all() and (expected[0] != 0).all()
    for view in views.values():
        assert (view.batch, view.num_kv_heads, view.head_dim) == (BATCH, HEADS, DIM)
        assert (view.dtype, view.device, view.window_left) == (torch.float32, k.device, window_left)
        torch.testing.assert_close(view.attend(query(device), 0.5), expected, rtol=1e-5, atol=1e-6)
    assert views["HND"].page_size == page_size and views["dense"].page_size == LENGTH


def test_no_cache_is_copied() -> None:
    k, v = dense_cache()
    grown = [torch.cat([t, t], dim=2)[:, :, :LENGTH] for t in (k, v)]  # a static cache, longer than what is used
    pk, table = pages_of(k, 4)
    hnd, pool = torch.zeros(5, HEADS, 4, DIM), torch.zeros(50, HEADS, DIM)
    lengths, indptr = torch.tensor(LENGTHS), torch.tensor([0, 3, 3, 5])
    for view, one, two in (
        (KVView.dense(k, v), k, v),
        (KVView.dense(*grown), grown[0], grown[1]),
        (KVView.paged(pk, pk, table, lengths), pk, pk),
        (KVView.paged(hnd, hnd, table, lengths, layout="HND"), hnd, hnd),
        (KVView.ragged(pool, pool, indptr, torch.arange(5), lengths), pool, pool),
    ):
        assert same_storage(view.k_cache, one) and same_storage(view.v_cache, two)
        assert view.k_cache.data_ptr() == one.data_ptr() and view.v_cache.data_ptr() == two.data_ptr()
        again = view.with_seq_lens(lengths)
        assert again.k_cache is view.k_cache and again.block_table is view.block_table


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1, 9])
def test_dense_against_plain_attention(dtype: torch.dtype, length: int) -> None:
    """All keys without seq_lens, as scaled_dot_product_attention sees transformers' cache."""
    k, v = (t[:, :, :length] for t in dense_cache(dtype=dtype))
    q = query(dtype=dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2).float(), k.float(), v.float(), scale=0.5, enable_gqa=True
    ).transpose(1, 2)
    got = KVView.dense(k, v).attend(q, 0.5)
    torch.testing.assert_close(got, expected.to(dtype))


def test_empty_caches() -> None:
    k = torch.zeros(BATCH, HEADS, 0, DIM)
    assert (KVView.dense(k, k).attend(query(), 1.0) == 0).all()
    nobody = torch.zeros(0, HEADS, 5, DIM)
    assert KVView.dense(nobody, nobody).attend(query()[:0], 1.0).shape == (0, 2, 2 * HEADS, DIM)


def test_every_option_reaches_the_op() -> None:
    k, v = dense_cache()
    (pk, table), (pv, _) = pages_of(k, 4), pages_of(v, 4)
    lengths, scale = torch.tensor(LENGTHS), torch.tensor([0.5, 0.25])
    indptr = torch.arange(BATCH + 1) * table.size(1)
    q = query()
    how = {
        "q_norm_weight": torch.rand(DIM),
        "q_norm_eps": 0.1,
        "rope_inv_freq": torch.rand(DIM // 2),
        "positions": torch.tensor([5, 0, 9]),
        "logits_soft_cap": 1.5,
    }
    fp8 = [t.to(FP8) for t in (pk, pv)]
    caches = {"window_left": 3, "k_scale": scale, "v_scale": scale[:1]}
    expected = torch.ops.mtp.draft_attention(q, *fp8, table, lengths, 0.5, **caches, **how)
    assert_same_bits(KVView.paged(*fp8, table, lengths, **caches).attend(q, 0.5, **how), expected)
    ragged = KVView.ragged(*fp8, indptr, table.flatten(), lengths, **caches, max_seq_len=LENGTH)
    torch.testing.assert_close(ragged.attend(q, 0.5, **how), expected)
    dense = KVView.dense(*(t.to(FP8) for t in (k, v)), lengths, **caches)
    torch.testing.assert_close(dense.attend(q, 0.5, **how), expected)
    for left_out in how:  # each one matters
        less = {n: x for n, x in how.items() if n != left_out and not (left_out == "positions" and n[:4] == "rope")}
        less = {n: x for n, x in less.items() if not (left_out == "rope_inv_freq" and n == "positions")}
        assert not torch.equal(ragged.attend(q, 0.5, **less), expected)


def test_with_seq_lens() -> None:
    k, v = dense_cache()
    view = KVView.dense(k, v, window_left=4)
    shorter = view.with_seq_lens(torch.tensor(LENGTHS))
    assert_same_bits(shorter.attend(query(), 1.0), KVView.dense(k, v, torch.tensor(LENGTHS), 4).attend(query(), 1.0))
    assert view.seq_lens.tolist() == [LENGTH] * BATCH
    assert (shorter.max_seq_len, view.with_seq_lens(view.seq_lens, 20).max_seq_len) == (LENGTH, 20)


def test_lengths_written_in_place_are_seen() -> None:
    k, v = dense_cache()
    lengths = torch.tensor(LENGTHS)
    view = KVView.dense(k, v, lengths)
    before = view.attend(query(), 1.0)
    lengths.fill_(3)
    assert not torch.equal(view.attend(query(), 1.0), before)


@pytest.mark.parametrize("kind", ["paged", "ragged", "dense"])
def test_compiles_to_one_graph(kind: str) -> None:
    k, v = dense_cache()
    (pk, table), (pv, _) = pages_of(k, 4), pages_of(v, 4)
    lengths = torch.tensor(LENGTHS)

    def make(k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> KVView:
        if kind == "paged":
            return KVView.paged(pk, pv, table, lengths, 4)
        if kind == "ragged":
            return KVView.ragged(pk, pv, torch.arange(BATCH + 1) * table.size(1), table.flatten(), lengths, 4)
        return KVView.dense(k, v, lengths, 4)

    view = make(k, v, pk, pv)
    expected = view.attend(query() * 2, 0.5)

    def captured(q: Tensor) -> Tensor:
        return view.attend(q * 2, 0.5)

    def passed(q: Tensor, kv: dict[str, KVView]) -> Tensor:
        return kv["full_attention"].attend(q * 2, 0.5)

    def made_inside(q: Tensor, *caches: Tensor) -> Tensor:
        return make(*caches).attend(q * 2, 0.5)

    for function, rest in ((captured, ()), (passed, ({"full_attention": view},)), (made_inside, (k, v, pk, pv))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_same_bits(compiled(query(), *rest), expected)


def test_a_view_cannot_be_changed() -> None:
    view = KVView.dense(*dense_cache())
    with pytest.raises(AttributeError):
        view.window_left = 3  # type: ignore[misc]
    assert view == view and view != KVView.dense(*dense_cache())  # by identity: comparing tensors would be a surprise


def test_errors() -> None:
    k, v = dense_cache()
    (pk, table), lengths = pages_of(k, 4), torch.tensor(LENGTHS)
    indptr, flat = torch.tensor([0, 3, 6, 9]), table.flatten()
    pool = torch.zeros(50, HEADS, DIM)
    fp8, one = pk.to(FP8), torch.ones(1)

    def bad(message: str, function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ArgumentError) as error:
            function(*args, **kwargs)
        assert str(error.value) == message

    paged, ragged, dense = KVView.paged, KVView.ragged, KVView.dense
    bad("KVView.paged: k: expected 4 dimensions, got 3 ([50, 2, 16])", paged, pool, pool, table, lengths)
    bad("KVView.paged: v: expected [9, 4, 2, 16], got [8, 4, 2, 16] (the shape of k)", paged, pk, pk[1:], table,
        lengths)
    bad("KVView.paged: v: expected float32, got float16 (k is float32)", paged, pk, pk.half(), table, lengths)
    bad("KVView.paged: k: expected bfloat16 or float16 or float32 or float8_e4m3fn, got float64", paged, pk.double(),
        pk.double(), table, lengths)
    bad("KVView.paged: k: expected an even head_dim, got 15", paged, pk[..., 1:], pk[..., 1:], table, lengths)
    bad("KVView.paged: k: expected at least 1 KV head, got 0", paged, pk[:, :, :0], pk[:, :, :0], table, lengths)
    strided = torch.empty(9, 4, 2, 32)[..., ::2]
    bad("KVView.paged: v: expected a contiguous last dimension, got strides [256, 64, 32, 2]", paged, pk, strided,
        table, lengths)
    bad("KVView.paged: layout: expected 'NHD' or 'HND', got 'nhd'", paged, pk, pk, table, lengths, layout="nhd")
    bad("KVView.paged: block_table: expected [3, *], got [2, 3] (batch of seq_lens is 3)", paged, pk, pk, table[:2],
        lengths)
    bad("KVView.paged: block_table: expected [3, *], got [9] (batch of seq_lens is 3)", paged, pk, pk, flat, lengths)
    bad("KVView.paged: block_table: expected int32 or int64, got float32", paged, pk, pk, table.float(), lengths)
    bad("KVView.paged: block_table: expected cpu, got meta (k is on cpu)", paged, pk, pk, table.to("meta"), lengths)
    bad("KVView.paged: seq_lens: expected 1 dimensions, got 0 ([])", paged, pk, pk, table, lengths[0])
    bad("KVView.paged: seq_lens: expected int32 or int64, got float32", paged, pk, pk, table, lengths.float())
    bad("KVView.paged: k_scale: expected a tensor, got None (k is float8_e4m3fn)", paged, fp8, fp8, table, lengths)
    bad("KVView.paged: v_scale: expected a tensor, got None (k is float8_e4m3fn)", paged, fp8, fp8, table, lengths,
        k_scale=one)
    bad("KVView.paged: k_scale: expected one element or [2], got [3] (k has 2 KV heads)", paged, fp8, fp8, table,
        lengths, k_scale=torch.ones(3), v_scale=one)
    bad("KVView.paged: v_scale: expected float32, got float64", paged, pk, pk, table, lengths, v_scale=one.double())
    bad("KVView.paged: max_seq_len: expected at least -1, got -5", paged, pk, pk, table, lengths, max_seq_len=-5)
    bad("KVView.ragged: k: expected 3 dimensions or 4 dimensions, got 2 ([50, 2])", ragged, pool[..., 0], pool[..., 0],
        indptr, flat, lengths)
    bad("KVView.ragged: v: expected [50, 2, 16], got [9, 4, 2, 16] (the shape of k)", ragged, pool, pk, indptr, flat,
        lengths)
    bad("KVView.ragged: kv_indptr: expected [4], got [3] (batch of seq_lens is 3)", ragged, pk, pk, indptr[1:], flat,
        lengths)
    bad("KVView.ragged: kv_indptr: expected int32 or int64, got float32", ragged, pk, pk, indptr.float(), flat, lengths)
    bad("KVView.ragged: kv_indices: expected [*], got [3, 3] (flat beside kv_indptr)", ragged, pk, pk, indptr, table,
        lengths)
    bad("KVView.ragged: kv_indices: expected int32 or int64, got uint8", ragged, pk, pk, indptr, flat.byte(), lengths)
    bad("KVView.dense: k: expected 4 dimensions, got 3 ([2, 12, 16])", dense, k[0], v[0])
    bad("KVView.dense: v: expected [3, 2, 12, 16], got [3, 2, 11, 16] (the shape of k)", dense, k, v[:, :, 1:])
    bad("KVView.dense: seq_lens: expected [3], got [2] (batch of k is 3)", dense, k, v, lengths[1:])
    bad("KVView.dense: k_scale: expected a tensor, got None (k is float8_e4m3fn)", dense, k.to(FP8), v.to(FP8))
    bad("KVView.with_seq_lens: seq_lens: expected [3], got [2] (batch of seq_lens is 3)", dense(k, v).with_seq_lens,
        lengths[1:])
