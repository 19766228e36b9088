"""DraftPolicy: how many tokens to draft in the next round, or none."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops._checks import ArgumentError, check_range, fail, require
from ._acceptance import Acceptance
from ._costs import DEFAULT, SHORTEST, CostModel, RoundCosts, check_seconds, row_of

Array = NDArray[np.float64]

WHERE = "DraftPolicy"
VERSION = 1
SAVED_ROUNDS = 3.0  # rounds' worth of time that probes may lose at once, and may lose in the beginning
OLDEST = 512.0  # rounds after which a depth is as good as never run
PROBE_EVERY, PROBE_AGAIN = 8, 16  # rounds between two probes, and between two of one depth, at the least
CHEAPEST = 0.01  # of a round's time: what a probe is taken to lose at least, so that others have their turn


@dataclass
class _Row:
    """What is remembered for a batch size."""

    seen: Array  # [depths] the round in which each was last run
    depth: int = -1  # the best one so far; -1 for none


class DraftPolicy:
    """Chooses num_steps for each round so that drafting gives the most tokens a second, and never slows a busy batch.

    At depth d, a round of the batch makes T(d) tokens a request, T(0) = 1, and takes draft(batch, d) + verify(batch *
    (d + 1)) seconds; the depth with the most tokens a second is run. T comes from the measured acceptance, of all
    requests and of each by itself, where a new one starts as the average (`Acceptance` says how). The seconds are a
    model's, corrected by those measured (`RoundCosts`). The depth in use stays until another is better by `margin`.
    What is not in use is measured too: a probe runs another depth for one round, mostly one that costs little or was
    not run for long, and what all probes lose may come to the share `explore` of the time, and three rounds. Without
    `costs` the first rounds draft nothing, and then at most one token more than at any time before.

    Args:
        max_steps: the greatest depth, at least 1.
        costs: seconds to start from; None for a rough guess. Good ones only save the first rounds.
        prior_acceptance: of a drafted token, before anything is measured; between 0 and 1.
        margin: by how much another depth must be better to take over.
        explore: the share of time that probes may cost; 0 for none.

    Raises:
        ArgumentError: a number out of range.

    Nothing is random: the same calls give the same choices. A round costs 0.15 ms of the host for one request and
    0.3 ms for 128 (on a core of an AMD EPYC).

    >>> from mtp_kernels import CostModel, DraftPolicy
    >>> costs = CostModel(draft_step=[(1, 1e-3)], verify=[(1, 20e-3), (128, 20e-3), (256, 40e-3)])
    >>> policy = DraftPolicy(max_steps=4, costs=costs, explore=0)
    >>> policy.choose(batch=1), policy.choose(batch=128)
    (4, 0)
    >>> policy.update([7], num_drafted=[4], num_accepted=[1], draft_seconds=4e-3, verify_seconds=20e-3)
    """

    def __init__(
        self,
        max_steps: int = 8,
        *,
        costs: CostModel | None = None,
        prior_acceptance: float = 0.6,
        margin: float = 0.005,
        explore: float = 0.005,
    ) -> None:
        check_range(WHERE, "max_steps", max_steps, 1)
        require(0 < prior_acceptance < 1, WHERE, "prior_acceptance", "a number between 0 and 1", prior_acceptance)
        require(0 <= margin < math.inf, WHERE, "margin", "a finite number >= 0", margin)
        require(0 <= explore < 1, WHERE, "explore", "a number from 0 to below 1", explore)
        if costs is not None and not isinstance(costs, CostModel):
            fail(WHERE, "costs", "a CostModel", type(costs).__name__)
        self.max_steps, self.margin, self.explore = max_steps, margin, explore
        self.acceptance = Acceptance(max_steps, prior_acceptance)
        self.costs = RoundCosts(max_steps, DEFAULT if costs is None else costs)
        self.rounds = 0
        self._cautious = costs is None
        self._opted_out: set[Hashable] = set()
        self._rows: dict[int, _Row] = {}
        self._last_probe = 0
        self._credit: float | None = None  # seconds that probes may cost now; None before the first round

    def choose(self, batch: int, request_ids: Sequence[Hashable] | None = None) -> int:
        """num_steps of the next round of these requests; 0: do not draft.

        Args:
            batch: requests in the round.
            request_ids: those that would draft, at most `batch`; the others take one token a round at any depth. None
                where they are not known: all draft and count as the average then.

        Raises:
            ArgumentError: a negative batch, or more ids than that.
        """
        check_range(WHERE, "batch", batch, 0)
        if request_ids is not None and len(request_ids) > batch:
            fail(WHERE, "request_ids", f"at most {batch} ids", len(request_ids), "batch")
        drafting = batch if request_ids is None else self._drafting(request_ids)
        if drafting == 0:
            return 0
        rates, seconds = self._rates(batch, drafting, request_ids)
        if self._cautious:  # one step deeper than was measured: the guess may be wrong by any factor
            rates[self.costs.reach(batch) + 2 :] = 0
        row = self._row(batch)
        best = self._settle(row, rates)
        probe = self._probe(row, rates, seconds, best)
        return best if probe is None else probe

    def update(
        self,
        request_ids: Sequence[Hashable],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """What a round came to, with or without a draft.

        Args:
            request_ids: [batch] the requests of the round.
            num_drafted: [batch] tokens drafted for each; 0 for a request that did not draft.
            num_accepted: [batch] how many of them the target accepted, as the verification counts them.
            draft_seconds: of drafting, 0 where nothing was drafted.
            verify_seconds: of everything else in the round.

        Raises:
            ArgumentError: lists of different lengths, counts out of range, or seconds that are not finite or negative.
        """
        batch = len(request_ids)
        for name, counts in (("num_drafted", num_drafted), ("num_accepted", num_accepted)):
            require(len(counts) == batch, WHERE, name, f"{batch} counts", len(counts), "request_ids")
        for place, (drafted, accepted) in enumerate(zip(num_drafted, num_accepted)):
            if not 0 <= accepted <= drafted <= self.max_steps:
                check_range(WHERE, f"num_drafted[{place}]", drafted, 0, self.max_steps, "max_steps")
                check_range(WHERE, f"num_accepted[{place}]", accepted, 0, drafted, "num_drafted")
        check_seconds(WHERE, "draft_seconds", draft_seconds)
        check_seconds(WHERE, "verify_seconds", verify_seconds)
        if batch == 0:
            return
        depth = max(num_drafted)
        row = self._row(batch)
        self.rounds += 1
        row.seen[depth] = self.rounds
        self.acceptance.update(request_ids, num_drafted, num_accepted)
        if verify_seconds >= SHORTEST:
            self.costs.update(batch, batch + sum(num_drafted), depth, draft_seconds, verify_seconds)
            self._pay(row, depth, request_ids, draft_seconds + verify_seconds)

    def opt_out(self, request_id: Hashable) -> None:
        """Count on no accepted token of this request, whatever the engine drafts for it; until `forget`."""
        self._opted_out.add(request_id)

    def forget(self, request_id: Hashable) -> None:
        """Drop what is known of a request that has ended. Without it, memory grows by each request."""
        self._opted_out.discard(request_id)
        self.acceptance.forget(request_id)

    def rates(self, batch: int, request_ids: Sequence[Hashable] | None = None) -> list[float]:
        """Expected tokens a second of the batch at each depth 0 to max_steps, as `choose` compares them."""
        drafting = batch if request_ids is None else self._drafting(request_ids)
        return self._rates(batch, drafting, request_ids)[0].tolist()

    def to_dict(self) -> dict[str, Any]:
        """Everything it knows and was given, for json.dump where the request ids are numbers or text."""
        return {
            "version": VERSION,
            "max_steps": self.max_steps,
            "prior_acceptance": self.acceptance.prior,
            "margin": self.margin,
            "explore": self.explore,
            "rounds": self.rounds,
            "cautious": self._cautious,
            "credit": self._credit,
            "last_probe": self._last_probe,
            "rows": {str(key): [row.seen.tolist(), row.depth] for key, row in self._rows.items()},
            "opted_out": list(self._opted_out),
            "acceptance": self.acceptance.to_dict(),
            "costs": self.costs.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> DraftPolicy:
        """The policy that `to_dict` was called on: it chooses as that one goes on to choose.

        Raises:
            ArgumentError: not what `to_dict` gives.
        """
        if not isinstance(state, dict) or state.get("version") != VERSION:
            got = state.get("version") if isinstance(state, dict) else type(state).__name__
            fail(f"{WHERE}.from_dict", "state", f"a dict of version {VERSION}", got)
        try:
            policy = cls(
                state["max_steps"], costs=CostModel(**state["costs"]["model"]),
                prior_acceptance=state["prior_acceptance"], margin=state["margin"], explore=state["explore"],
            )
            policy.rounds, policy._cautious = state["rounds"], state["cautious"]
            policy._credit, policy._last_probe = state["credit"], state["last_probe"]
            policy._rows = {
                int(key): _Row(np.array(seen, dtype=float), depth) for key, (seen, depth) in state["rows"].items()
            }
            policy._opted_out = set(state["opted_out"])
            policy.acceptance.load(state["acceptance"])
            policy.costs.load(state["costs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"{WHERE}.from_dict: state: expected what to_dict gives, got {error!r}") from error
        return policy

    def _drafting(self, request_ids: Sequence[Hashable]) -> int:
        if not self._opted_out:
            return len(request_ids)
        return sum(request not in self._opted_out for request in request_ids)

    def _rates(self, batch: int, drafting: int, request_ids: Sequence[Hashable] | None) -> tuple[Array, Array]:
        """Tokens a second, and seconds, at each depth."""
        draft, verify = self.costs.predict(batch, drafting)
        if request_ids is not None and drafting < batch:
            request_ids = [request for request in request_ids if request not in self._opted_out]
        yields = drafting * self.acceptance.tokens(request_ids) + (batch - drafting)
        seconds = draft + verify
        return yields / seconds, seconds

    def _row(self, batch: int) -> _Row:
        key = row_of(batch)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(np.full(self.max_steps + 1, -OLDEST))
        return row

    def _settle(self, row: _Row, rates: Array) -> int:
        """The row's depth, which gives way only to one that is better by the margin."""
        best = int(rates.argmax())
        if row.depth < 0 or rates[best] > rates[row.depth] * (1 + self.margin):
            row.depth = best
        return row.depth

    def _probe(self, row: _Row, rates: Array, seconds: Array, best: int) -> int | None:
        """Another depth to run once, or None: the one whose age is greatest beside the square of what it would lose.

        The square keeps to the depths beside the best one; those far away lose much and could hardly be the best.
        """
        if self._credit is None or self._credit <= 0 or self.rounds - self._last_probe < PROBE_EVERY:
            return None
        loss = seconds * (1 - rates / rates[best])
        age = np.minimum(self.rounds - row.seen, OLDEST)
        worth = age / np.maximum(loss, CHEAPEST * seconds[best]) ** 2
        # What was never run may not be as bad as the model says: it has its turn when all there is to spend is saved.
        saved = self._credit >= 0.9 * SAVED_ROUNDS * seconds[best]
        too_dear = (loss > self._credit) & ~(saved & (age >= OLDEST))
        worth[too_dear | (age < PROBE_AGAIN) | (rates == 0)] = 0
        worth[best] = 0
        depth = int(worth.argmax())
        if worth[depth] == 0:
            return None
        self._last_probe = self.rounds
        return depth

    def _pay(self, row: _Row, depth: int, request_ids: Sequence[Hashable], seconds: float) -> None:
        """A round earns its share of time for probes; one at another depth costs what it lost."""
        if self._credit is None:
            self._credit = SAVED_ROUNDS * seconds
        earned = self.explore * seconds
        if row.depth >= 0 and depth != row.depth:
            # By the estimate, and never deep into debt: a round that took ten times as long by chance ends no probing.
            rates, expected = self._rates(len(request_ids), self._drafting(request_ids), request_ids)
            loss = float(expected[depth] * max(0.0, 1 - rates[depth] / rates[row.depth]))
            earned -= min(loss, 2 * SAVED_ROUNDS * float(expected[row.depth]))
        self._credit = min(self._credit + earned, SAVED_ROUNDS * seconds) if self.explore > 0 else 0.0
