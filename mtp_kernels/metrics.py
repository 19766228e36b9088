"""Acceptance metrics: what the rounds of any number of requests came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .ops._checks import fail, require

WHERE = "AcceptanceStats"


@dataclass
class AcceptanceStats:
    """Counts of drafted and accepted tokens, by position in the draft.

    A round is one request's: `num_drafted` levels deep, of which the target accepted the first `num_accepted` and added
    a token of its own. A round without a draft counts, with the one token that it makes. Of a tree, give its depth
    as `num_drafted`.

    >>> stats = AcceptanceStats()
    >>> stats.update(num_accepted=[2, 0, 0], num_drafted=[4, 4, 0])
    >>> stats.rounds, stats.tokens, stats.acceptance_rate, stats.mean_accepted_length
    (3, 5, 0.25, 1.0)
    >>> stats.accepted_per_position
    [0.5, 0.5, 0.0, 0.0]
    >>> print(stats.prometheus("mtp").splitlines()[1])
    mtp_rounds_total 3
    """

    rounds: int = 0
    drafting_rounds: int = 0  # rounds that drafted at least one token
    drafted: list[int] = field(default_factory=list)  # rounds that drafted at least 1, 2, ... tokens
    accepted: list[int] = field(default_factory=list)  # rounds that accepted at least 1, 2, ... tokens

    def update(self, num_accepted: Sequence[int], num_drafted: Sequence[int] | int) -> None:
        """Add rounds, one for each element.

        Args:
            num_accepted: accepted drafted tokens of each round.
            num_drafted: drafted ones; one number for all of them, or a number for each.

        Raises:
            ArgumentError: different lengths, a negative count, or more accepted than drafted; nothing is added then.
        """
        counts = [num_drafted] * len(num_accepted) if isinstance(num_drafted, int) else num_drafted
        require(len(counts) == len(num_accepted), WHERE, "num_drafted", f"{len(num_accepted)} counts", len(counts),
                "num_accepted")
        for place, (accepted, drafted) in enumerate(zip(num_accepted, counts)):
            if drafted < 0:
                fail(WHERE, f"num_drafted[{place}]", "at least 0", drafted)
            if not 0 <= accepted <= drafted:
                fail(WHERE, f"num_accepted[{place}]", f"0 to {drafted}", accepted, "num_drafted")
        self._lengthen(max(counts, default=0))
        for accepted, drafted in zip(num_accepted, counts):
            self.rounds += 1
            self.drafting_rounds += drafted > 0
            for position in range(drafted):
                self.drafted[position] += 1
                self.accepted[position] += position < accepted

    def merge(self, other: AcceptanceStats) -> None:
        """Add the rounds of another one, of another worker for example."""
        self._lengthen(len(other.drafted))
        self.rounds += other.rounds
        self.drafting_rounds += other.drafting_rounds
        for position, (drafted, accepted) in enumerate(zip(other.drafted, other.accepted)):
            self.drafted[position] += drafted
            self.accepted[position] += accepted

    @property
    def tokens(self) -> int:
        """Made by all rounds: the accepted tokens, and one of the target's own in each."""
        return self.rounds + sum(self.accepted)

    @property
    def tokens_per_round(self) -> float:
        """1 where nothing is accepted; 0 without rounds."""
        return _share(self.tokens, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return _share(sum(self.accepted), sum(self.drafted))

    @property
    def mean_accepted_length(self) -> float:
        """Accepted tokens of a round that drafted."""
        return _share(sum(self.accepted), self.drafting_rounds)

    @property
    def accepted_per_position(self) -> list[float]:
        """Of the rounds that drafted position 1, 2, ..., the share in which it was accepted, and all before it."""
        return [_share(accepted, drafted) for accepted, drafted in zip(self.accepted, self.drafted)]

    @property
    def histogram(self) -> list[int]:
        """Rounds that drafted and accepted exactly 0, 1, 2, ... tokens."""
        reached = [self.drafting_rounds, *self.accepted, 0]
        return [more - fewer for more, fewer in pairwise(reached)]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "rounds": self.rounds,
            "drafting_rounds": self.drafting_rounds,
            "tokens": self.tokens,
            "tokens_per_round": self.tokens_per_round,
            "drafted_tokens": sum(self.drafted),
            "accepted_tokens": sum(self.accepted),
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "accepted_per_position": self.accepted_per_position,
            "histogram": self.histogram,
        }

    def prometheus(self, prefix: str = "mtp") -> str:
        """Counters in Prometheus' text format; rates follow from them."""
        rows: list[tuple[str, Sequence[tuple[str, int]]]] = [
            ("rounds", [("", self.rounds)]),
            ("tokens", [("", self.tokens)]),
            ("drafted_tokens", _by_position(self.drafted)),
            ("accepted_tokens", _by_position(self.accepted)),
        ]
        lines = []
        for name, values in rows:
            lines.append(f"# TYPE {prefix}_{name}_total counter")
            lines += (f"{prefix}_{name}_total{labels} {value}" for labels, value in values)
        return "\n".join(lines) + "\n"

    def _lengthen(self, depth: int) -> None:
        for counts in (self.drafted, self.accepted):
            counts.extend([0] * (depth - len(counts)))


def _by_position(counts: Sequence[int]) -> list[tuple[str, int]]:
    return [(f'{{position="{place}"}}', count) for place, count in enumerate(counts, 1)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
