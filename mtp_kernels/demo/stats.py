"""What a run of rounds amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..integrations.greedy import Round


@dataclass(frozen=True)
class Summary:
    """Figures over the rounds that drafted (the prefill is not one)."""

    rounds: int
    tokens: int  # generated in those rounds
    tokens_per_round: float  # accepted and bonus
    accepted_per_position: list[float]  # share of rounds whose draft was accepted at least that deep
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float  # the target's forward and the commit

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "tokens_per_round": self.tokens_per_round,
            "accepted_per_position": self.accepted_per_position,
            "times": {
                "prefill_seconds": self.prefill_seconds,
                "draft_seconds": self.draft_seconds,
                "verify_seconds": self.verify_seconds,
            },
        }


def summarize(rounds: Sequence[Round], depth: int) -> Summary:
    """Summary of the rounds of one or more generations, drafted `depth` steps deep."""
    drafting = [r for r in rounds if r.num_drafted]
    count = len(drafting)
    tokens = sum(len(r.token_ids) for r in drafting)
    reached = [sum(r.num_accepted > d for r in drafting) for d in range(depth)]
    return Summary(
        rounds=count,
        tokens=tokens,
        tokens_per_round=tokens / count if count else 0.0,
        accepted_per_position=[n / count if count else 0.0 for n in reached],
        prefill_seconds=sum(r.verify_seconds for r in rounds if not r.num_drafted),
        draft_seconds=sum((r.draft_seconds for r in drafting), 0.0),
        verify_seconds=sum((r.verify_seconds for r in drafting), 0.0),
    )
