"""Where the inputs of a benchmark come from: random values of a model's sizes, several sets of them, paged caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..demo.pair import pair_directory
from ..weights import PRESETS, AssistantConfig
from ..weights._parse import parse_config

TABLE_ROWS = 4096


def config_of(model: str) -> AssistantConfig:
    """Sizes of a model: a preset's, or those of the example pair."""
    if model != "pair":
        return PRESETS[model]
    folder = pair_directory() / "assistant-centroid"
    config = folder / "config.json"
    return parse_config(config, json.loads(config.read_text(encoding="utf-8")))


class Inputs:
    """Makes the tensors of one set of inputs; sets differ in values and lie in memory of their own.

    `shared` is for what all sets may use together: tables so large, or read so sparsely, that no cache holds what the
    last call read.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self._seed = seed
        self._generator = torch.Generator(self.device)
        self._shared: dict[str, Any] = {}
        self.next_set(0)

    def next_set(self, index: int) -> Inputs:
        """Values of set `index`: the same in every run."""
        self._generator.manual_seed(self._seed * 1_000_003 + index)
        return self

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        wanted = dtype or self.dtype
        made = torch.float32 if wanted.itemsize == 1 else wanted
        values = torch.empty(shape, dtype=made, device=self.device).normal_(mean, std, generator=self._generator)
        return values.to(wanted)

    def matrix(self, out: int, inner: int) -> Tensor:
        """A projection under which activations keep their size."""
        return self.normal(out, inner, std=inner**-0.5)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, mean=1.0, std=0.1)

    def table(self, rows: int, width: int) -> Tensor:
        """An embedding, a block of random rows repeated: a target's has hundreds of millions of values."""
        block = self.normal(min(rows, TABLE_ROWS), width, std=width**-0.5)
        return block.repeat(-(-rows // TABLE_ROWS), 1)[:rows]

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(*shape, generator=self._generator, device=self.device, dtype=dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator, device=self.device)

    def paged_cache(
        self, batch: int, context: int, heads: int, head_dim: int, page_size: int, layout: str, dtype: torch.dtype,
        k_std: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(k_cache, v_cache, block_table, seq_lens): pages in random order, caches as [pages, slots, heads, dim]."""
        pages = -(-context // page_size)
        order = ("pages", "slots", "heads") if layout == "NHD" else ("pages", "heads", "slots")
        sizes = {"pages": batch * pages, "slots": page_size, "heads": heads}
        shape = (*(sizes[name] for name in order), head_dim)
        k, v = self.normal(*shape, std=k_std, dtype=dtype), self.normal(*shape, dtype=dtype)
        if layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        table = self.permutation(batch * pages).int().view(batch, pages)
        return k, v, table, torch.full((batch,), context, dtype=torch.int32, device=self.device)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all elements of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def take_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """cache[pages], for fp8 too, which not every device indexes."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[pages].view(cache.dtype)
    return cache[pages]
