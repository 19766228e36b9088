"""A small paged KV store: pages, a free list a layer type, block tables, and rows that a verified tree keeps or drops.

It is what serving engines have, in small: the drafter reads the pages by their block tables; the target, which is
transformers' model, is given them gathered, through the `update` that it calls on any cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..kv_view import KVView
from ..ops._checks import check_range, fail, require
from ._page_pool import PagePool

WHERE = "PagedCache"


class PagedCache:
    """Keys and values of many requests in pages of `page_size` rows; each layer type has pools and tables of its own.

    A request's rows lie in the order of their positions. `append` opens rows behind the committed ones for one
    forward of the target, `keep` commits some of them (a path through a draft tree, say) and drops the others, and
    `release` gives all pages of a request back.

    Args:
        layer_types: the type of each layer of the target that stores KV, in order ("sliding_attention", ...).
        num_pages: pages of each layer type; one number for all, or one a layer type.
        page_size: rows a page, the same.
        device: where the pages lie.

    Raises:
        ArgumentError: a size below 1, a missing layer type, more rows than there are free pages for, or a request
            that is not here. Nothing has changed then.

    >>> cache = PagedCache(["full_attention"], num_pages=5, page_size=2)
    >>> rows = cache.append([7], [3])                                   # request 7 runs three new rows
    >>> k, v = torch.randn(2, 1, 1, 3, 64).unbind()                     # [batch, num_kv_heads, rows, head_dim]
    >>> k_all, v_all = rows.update(k, v, 0)                             # what the layer attends to
    >>> cache.keep([7], [[0, 2]])                                       # the middle one was rejected
    >>> cache.lengths[7], cache.num_free("full_attention"), torch.equal(k_all, k)
    (2, 4, True)
    >>> view = cache.view(0, [7])                                       # for draft()
    >>> view.page_size, view.seq_lens.tolist()
    (2, [2])
    """

    def __init__(
        self,
        layer_types: Sequence[str],
        num_pages: int | Mapping[str, int],
        page_size: int | Mapping[str, int] = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layer_types = tuple(layer_types)
        self.device = torch.empty(0, device=device).device
        self.lengths: dict[int, int] = {}  # committed rows of each request
        self._open: dict[int, int] = {}  # rows that the last append added to each of its requests
        self.pools: dict[str, PagePool] = {}
        for layer_type in dict.fromkeys(self.layer_types):
            pages, size = _of(num_pages, layer_type, "num_pages"), _of(page_size, layer_type, "page_size")
            self.pools[layer_type] = PagePool(layer_type, pages, size)
        self.k: dict[int, Tensor] = {}  # layer -> [num_pages, page_size, num_kv_heads, head_dim], made at first use
        self.v: dict[int, Tensor] = {}

    def append(self, requests: Sequence[int], counts: Sequence[int]) -> AppendedRows:
        """Room for counts[b] rows behind the committed ones of requests[b], which may be new. Uncommitted rows go."""
        require(len(set(requests)) == len(requests), WHERE, "requests", "each request once", list(requests))
        require(len(counts) == len(requests), WHERE, "counts", f"{len(requests)} numbers", len(counts))
        for count in counts:
            check_range(WHERE, "counts", count, 1)
        wanted = {r: self.lengths.get(r, 0) + n for r, n in zip(requests, counts)}
        for pool in self.pools.values():
            pool.check_room(wanted)
        for pool in self.pools.values():
            pool.resize(wanted)
        for request in requests:
            self.lengths.setdefault(request, 0)
        self._open = dict(zip(requests, counts))
        return AppendedRows(self, requests, counts)

    def keep(self, requests: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Commit rows[b] (ascending) of those that the last append gave requests[b]; the others are dropped."""
        require(len(rows) == len(requests), WHERE, "rows", f"{len(requests)} lists", len(rows))
        for request, kept in zip(requests, rows):
            if request not in self._open:
                fail(WHERE, "requests", f"those of the last append, {list(self._open)}", request)
            end = self._open[request]
            if not all(a < b for a, b in pairwise([-1, *kept, end])):
                fail(WHERE, "rows", f"ascending rows of 0 to {end - 1}", list(kept), f"request {request}")
        for layer_type, pool in self.pools.items():
            self._move(layer_type, pool, requests, rows)
        for request, kept in zip(requests, rows):
            self.lengths[request] += len(kept)
            del self._open[request]
        for pool in self.pools.values():
            pool.resize({r: self.lengths[r] for r in requests})

    def release(self, request: int) -> None:
        """Give back all pages of a request."""
        self._check_known(request)
        del self.lengths[request]
        self._open.pop(request, None)
        for pool in self.pools.values():
            pool.release(request)

    def view(self, layer: int, requests: Sequence[int], window_left: int = -1) -> KVView:
        """The committed rows of one layer for these requests, in their order, as draft() reads them."""
        if layer not in self.k:
            fail(WHERE, "layer", f"one of {sorted(self.k)}", layer, "layers that have stored rows")
        for request in requests:
            self._check_known(request)
        table = self.pools[self.layer_types[layer]].table(requests, self.device)
        lengths = torch.tensor([self.lengths[r] for r in requests], device=self.device)
        return KVView.paged(self.k[layer], self.v[layer], table, lengths, window_left=window_left)

    def num_free(self, layer_type: str) -> int:
        """Free pages of a layer type."""
        return len(self.pools[layer_type].free)

    def flat(self, layer: int, like_k: Tensor, like_v: Tensor) -> tuple[Tensor, Tensor]:
        """Both caches of a layer as [num_slots, num_kv_heads, head_dim]; slot = page * page_size + row."""
        if layer not in self.k:
            pool = self.pools[self.layer_types[layer]]
            for cache, like in ((self.k, like_k), (self.v, like_v)):
                cache[layer] = like.new_zeros(pool.num_pages, pool.page_size, like.size(1), like.size(3))
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    def _move(
        self, layer_type: str, pool: PagePool, requests: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> None:
        """Close the gaps: kept row i goes to place i behind the committed ones. All are read before one is written."""
        moves = [
            (pool.slot(request, self.lengths[request] + row), pool.slot(request, self.lengths[request] + place))
            for request, kept in zip(requests, rows)
            for place, row in enumerate(kept)
            if row != place
        ]
        if not moves:
            return
        source, target = torch.tensor(moves, device=self.device).unbind(1)
        for layer in (i for i in self.k if self.layer_types[i] == layer_type):
            for cache in (self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)):
                cache[target] = cache[source]

    def _check_known(self, request: int) -> None:
        require(request in self.lengths, WHERE, "request", "a request that has rows", request)


class AppendedRows:
    """The rows of one forward: transformers' model calls `update` on it as on its own caches."""

    def __init__(self, cache: PagedCache, requests: Sequence[int], counts: Sequence[int]) -> None:
        self._cache = cache
        committed = [cache.lengths[r] for r in requests]
        self.total = max((n + m for n, m in zip(committed, counts)), default=0)  # columns of the gathered keys
        start = torch.tensor(committed, device=cache.device).unsqueeze(1)
        num_new = torch.tensor(counts).unsqueeze(1)
        end = start + num_new.to(cache.device)
        given = torch.arange(max(counts, default=0)) < num_new  # [batch, most new rows]
        self._given = given.nonzero().to(cache.device).unbind(1)  # of each new row, its request and its place there
        row = torch.arange(self.total, device=cache.device)
        self._used = row < end  # [batch, total]
        new = self._used & (row >= start)
        self._new: dict[str, Tensor] = {}  # layer type -> [rows] slots of the new rows, request by request
        self._all: dict[str, Tensor] = {}  # layer type -> [batch, total] slots of all rows; 0 behind a request's last
        for layer_type, pool in cache.pools.items():
            pages = pool.table(requests, cache.device)[:, row // pool.page_size]  # [batch, total]
            slots = (pages * pool.page_size + row % pool.page_size).masked_fill(~self._used, 0)
            self._new[layer_type], self._all[layer_type] = slots[new], slots

    def update(self, k: Tensor, v: Tensor, layer: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Store new rows k, v [batch, num_kv_heads, rows, head_dim]; rows behind a request's count are padding.

        Returns:
            K and V [batch, num_kv_heads, total, head_dim] of all rows, committed and new; zeros behind them.
        """
        layer_type = self._cache.layer_types[layer]
        gathered = []
        for cache, new in zip(self._cache.flat(layer, k, v), (k, v)):
            cache[self._new[layer_type]] = new.transpose(1, 2)[self._given]  # [rows, num_kv_heads, head_dim]
            seen = cache[self._all[layer_type]].masked_fill(~self._used[:, :, None, None], 0.0)
            gathered.append(seen.transpose(1, 2))
        return gathered[0], gathered[1]


def _of(value: int | Mapping[str, int], layer_type: str, name: str) -> int:
    if isinstance(value, Mapping):
        require(layer_type in value, WHERE, name, f"a number for {layer_type}", sorted(value))
        value = value[layer_type]
    check_range(WHERE, name, value, 1)
    return value
