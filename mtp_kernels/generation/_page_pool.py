"""The pages of one layer type: which are free, and which a request has. On the host; no tensor of KV is seen here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..ops._checks import require


class PagePool:
    """`num_pages` pages of `page_size` rows; the page given back last is the next one given out."""

    def __init__(self, layer_type: str, num_pages: int, page_size: int) -> None:
        self.layer_type, self.num_pages, self.page_size = layer_type, num_pages, page_size
        self.free = list(range(num_pages - 1, -1, -1))
        self.pages: dict[int, list[int]] = {}  # request -> its pages, in order

    def check_room(self, lengths: Mapping[int, int]) -> None:
        """There are pages for these requests at these lengths."""
        more = sum(max(0, self._num(n) - len(self.pages.get(r, ()))) for r, n in lengths.items())
        what = f"a cache with {more} free pages of {self.page_size} rows for {self.layer_type}"
        require(more <= len(self.free), "PagedCache", "num_pages", what, f"{len(self.free)} free of {self.num_pages}")

    def resize(self, lengths: Mapping[int, int]) -> None:
        """Give each request the pages that its length needs, and take back those that it does not."""
        for request, length in lengths.items():
            mine = self.pages.setdefault(request, [])
            while len(mine) > self._num(length):
                self.free.append(mine.pop())
            while len(mine) < self._num(length):
                mine.append(self.free.pop())

    def release(self, request: int) -> None:
        self.free += reversed(self.pages.pop(request))

    def slot(self, request: int, row: int) -> int:
        return self.pages[request][row // self.page_size] * self.page_size + row % self.page_size

    def table(self, requests: Sequence[int], device: torch.device) -> Tensor:
        """[batch, most pages] int64, -1 behind a request's last page."""
        most = max((len(self.pages[r]) for r in requests), default=0)
        rows = [self.pages[r] + [-1] * (most - len(self.pages[r])) for r in requests]
        return torch.tensor(rows, dtype=torch.int64, device=device).view(len(requests), most)

    def _num(self, length: int) -> int:
        return -(-length // self.page_size)
