"""What a generation amounts to: accepted tokens by position, tokens a round, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass
class GenerationStatistics:
    """Counts over rounds of requests (a batch of three makes three a round), and seconds over rounds of the batch.

    Seconds are wall clock, the device synchronised. Two add up: sum(list, GenerationStatistics()).

    >>> one = GenerationStatistics()
    >>> one.count(num_drafted=4, num_accepted=2, num_tokens=3)
    >>> one.count(num_drafted=4, num_accepted=0, num_tokens=1)
    >>> one.tokens_per_round, one.accepted_per_position
    (2.0, [0.5, 0.5, 0.0, 0.0])
    """

    rounds: int = 0  # rounds that drafted
    tokens: int = 0  # generated in those rounds: accepted ones and the target's own
    plain_rounds: int = 0  # rounds that did not draft, of one token each; the prefill is none
    reached: list[int] = field(default_factory=list)  # of the drafting rounds, those that accepted at least i + 1
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0  # accept, cut, and keep the accepted KV rows

    def count(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """One round of one request: depth drafted, draft tokens and tokens in all that it gave."""
        if num_drafted == 0:
            self.plain_rounds += 1
            return
        self.rounds += 1
        self.tokens += num_tokens
        self.reached += [0] * (num_drafted - len(self.reached))
        for depth in range(num_accepted):
            self.reached[depth] += 1

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of the drafting rounds that accepted at least 1, 2, ... draft tokens."""
        return [n / self.rounds for n in self.reached]

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.commit_seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "plain_rounds": self.plain_rounds,
            "tokens_per_round": self.tokens_per_round,
            "accepted_per_position": self.accepted_per_position,
            "times": {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_seconds")},
        }

    def __add__(self, other: GenerationStatistics) -> GenerationStatistics:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "reached"}
        reached = [a + b for a, b in zip_longest(self.reached, other.reached, fillvalue=0)]
        return GenerationStatistics(**sums, reached=reached)
