"""PagedCache: rows stay what they were written, whoever comes and goes; every page is somebody's or free."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_kernels import ArgumentError, PagedCache

TYPES = ("sliding_attention", "full_attention", "sliding_attention")
SHAPES = {"sliding_attention": (2, 4), "full_attention": (1, 6)}  # num_kv_heads, head_dim


@dataclass
class Shadow:
    """The same store as plain tensors: request -> layer -> committed rows [rows, heads, dim]."""

    k: dict[int, list[Tensor]] = field(default_factory=dict)
    v: dict[int, list[Tensor]] = field(default_factory=dict)


def random_rows(batch: int, count: int, layer: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    heads, dim = SHAPES[TYPES[layer]]
    k, v = torch.randn(2, batch, heads, count, dim, generator=generator).unbind()
    return k, v


def commit(cache: PagedCache, shadow: Shadow, plan: list[tuple[int, int, list[int]]], generator: torch.Generator
           ) -> None:
    """Append and keep (request, count, kept rows) for each; what `update` gathers is checked against the shadow."""
    requests, counts = [r for r, _, _ in plan], [n for _, n, _ in plan]
    rows = cache.append(requests, counts)
    new = []
    for layer in range(len(TYPES)):
        k, v = random_rows(len(plan), max(counts), layer, generator)
        new.append((k, v))
        gathered = rows.update(k, v, layer, "anything else that a version passes")
        for own, seen, fresh in ((shadow.k, gathered[0], k), (shadow.v, gathered[1], v)):
            for b, (request, count, _) in enumerate(plan):
                before = own[request][layer] if request in own else fresh.new_empty(0, *SHAPES[TYPES[layer]])
                whole = torch.cat([before, fresh[b, :, :count].transpose(0, 1)])
                assert torch.equal(seen[b, :, : len(whole)].transpose(0, 1), whole)
                assert not seen[b, :, len(whole) :].any()
    cache.keep(requests, [kept for _, _, kept in plan])
    for own, which in ((shadow.k, 0), (shadow.v, 1)):
        for b, (request, _, kept) in enumerate(plan):
            mine = own.setdefault(request, [torch.empty(0, *SHAPES[t]) for t in TYPES])
            for layer in range(len(TYPES)):
                mine[layer] = torch.cat([mine[layer], new[layer][which][b, :, kept].transpose(0, 1)])


def check(cache: PagedCache, shadow: Shadow) -> None:
    """Views give every committed row; no page is lost, shared, or kept without need."""
    requests = [r for r in cache.lengths if cache.lengths[r]]
    for layer in range(len(TYPES)) if requests else ():
        view = cache.view(layer, requests)
        for b, request in enumerate(requests):
            n = cache.lengths[request]
            table = view.block_table[b, : -(-n // view.page_size)]
            assert torch.equal(view.k_cache[table].flatten(0, 1)[:n], shadow.k[request][layer])
            assert torch.equal(view.v_cache[table].flatten(0, 1)[:n], shadow.v[request][layer])
        assert view.seq_lens.tolist() == [cache.lengths[r] for r in requests]
    for layer_type, pool in cache.pools.items():
        held = [page for pages in pool.pages.values() for page in pages]
        assert sorted(held + pool.free) == list(range(pool.num_pages))
        assert len(held) == sum(-(-n // pool.page_size) for n in cache.lengths.values())
        assert cache.num_free(layer_type) == len(pool.free)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_rows_are_those_written(data: st.DataObject) -> None:
    sizes = {t: data.draw(st.integers(1, 5), label=f"page_size of {t}") for t in SHAPES}
    cache, shadow = PagedCache(TYPES, num_pages=60, page_size=sizes), Shadow()
    generator = torch.Generator().manual_seed(0)
    for _ in range(data.draw(st.integers(1, 5), label="rounds")):
        requests = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), label="requests")
        plan = []
        for request in requests:
            count = data.draw(st.integers(1, 4), label="count")
            kept = sorted(data.draw(st.sets(st.integers(0, count - 1)), label="kept"))
            plan.append((request, count, kept))
        commit(cache, shadow, plan, generator)
        check(cache, shadow)
        if data.draw(st.booleans(), label="release"):
            cache.release(requests[0])
            del shadow.k[requests[0]], shadow.v[requests[0]]
            check(cache, shadow)


def test_stale_values_are_never_seen() -> None:
    """A page that is handed on may hold NaN."""
    cache = PagedCache(["full_attention"], num_pages=4, page_size=4)
    nan = torch.full((1, 1, 16, 6), torch.nan)
    cache.append([0], [16]).update(nan, nan, 0)
    cache.release(0)
    k, v = torch.randn(2, 2, 1, 3, 6).unbind()
    for seen, fresh in zip(cache.append([1, 2], [3, 1]).update(k, v, 0), (k, v)):
        assert torch.equal(seen[0], fresh[0]) and torch.equal(seen[1, :, :1], fresh[1, :, :1])
        assert not seen[1, :, 1:].any()


def test_a_page_given_back_is_used_again() -> None:
    cache = PagedCache(["full_attention"], num_pages=2, page_size=4)
    for request in range(10):
        cache.append([request], [8])
        cache.keep([request], [range(5)])
        cache.release(request)
    assert cache.num_free("full_attention") == 2 and cache.lengths == {}


def test_rows_never_kept_are_gone() -> None:
    """A second append starts behind the committed rows again, and a request may run out of the first one."""
    cache = PagedCache(["full_attention"], num_pages=3, page_size=2)
    cache.append([0], [6])
    cache.append([0], [1])
    assert cache.num_free("full_attention") == 2
    cache.keep([0], [[]])
    assert cache.lengths == {0: 0} and cache.num_free("full_attention") == 3


def test_too_many_rows_change_nothing() -> None:
    cache = PagedCache(["a", "b"], num_pages={"a": 4, "b": 2}, page_size={"a": 2, "b": 2})
    cache.append([0], [3])
    cache.keep([0], [range(3)])
    with pytest.raises(ArgumentError) as error:
        cache.append([0, 1], [1, 2])
    assert str(error.value) == (
        "PagedCache: num_pages: expected a cache with 1 free pages of 2 rows for b, got 0 free of 2"
    )
    assert cache.lengths == {0: 3} and cache.num_free("a") == 2 and cache.num_free("b") == 0


def test_errors_name_the_argument() -> None:
    cache = PagedCache(["full_attention"], num_pages=4, page_size=2)
    cases = [
        (lambda: PagedCache(["a"], 0), "PagedCache: num_pages: expected at least 1, got 0"),
        (lambda: PagedCache(["a"], 1, 0), "PagedCache: page_size: expected at least 1, got 0"),
        (lambda: PagedCache(["a"], {"b": 1}), "PagedCache: num_pages: expected a number for a, got ['b']"),
        (lambda: cache.append([0, 0], [1, 1]), "PagedCache: requests: expected each request once, got [0, 0]"),
        (lambda: cache.append([0], [1, 1]), "PagedCache: counts: expected 1 numbers, got 2"),
        (lambda: cache.append([0], [0]), "PagedCache: counts: expected at least 1, got 0"),
        (lambda: cache.release(7), "PagedCache: request: expected a request that has rows, got 7"),
        (lambda: cache.view(0, [7]), "PagedCache: layer: expected one of [], got 0 (layers that have stored rows)"),
    ]
    for call, message in cases:
        with pytest.raises(ArgumentError) as error:
            call()
        assert str(error.value) == message
    cache.append([0], [3])
    for rows, got in (([[0, 0]], "[0, 0]"), ([[3]], "[3]"), ([[-1]], "[-1]"), ([[1, 0]], "[1, 0]")):
        with pytest.raises(ArgumentError, match="PagedCache: rows: expected ascending rows of 0 to 2, got ") as error:
            cache.keep([0], rows)
        assert f"got {got} (request 0)" in str(error.value)
    with pytest.raises(ArgumentError, match=r"PagedCache: requests: expected those of the last append, \[0\], got 1"):
        cache.keep([1], [[0]])
    cache.keep([0], [[0, 2]])
    with pytest.raises(ArgumentError, match="PagedCache: requests: expected those of the last append"):
        cache.keep([0], [[0]])
    assert cache.lengths == {0: 2}
