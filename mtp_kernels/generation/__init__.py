"""The reference serving loop: generate() and what it is made of."""

from __future__ import annotations

from ._generate import GenerationOutput, generate
from ._loop import GenerationChunk
from ._policy import RoundPolicy
from ._statistics import GenerationStatistics
from .paged_cache import PagedCache

__all__ = ["GenerationChunk", "GenerationOutput", "GenerationStatistics", "PagedCache", "RoundPolicy", "generate"]
