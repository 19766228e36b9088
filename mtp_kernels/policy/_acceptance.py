"""What drafts have been worth: from counts of accepted tokens to the expected tokens of a round at every depth."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRIOR_WEIGHT = 4.0  # trials that a rate starts from: the given prior, then the rate one token earlier
POOL_TRIALS, POOL_ROUNDS = 400.0, 32.0  # drafted requests, or rounds, that the pool remembers: whichever is more
REQUEST_ROUNDS = 24.0  # rounds that a request remembers
REQUEST_WEIGHT = 8.0  # trials at the pool's rates that a request starts from
SHIFTS = np.arange(-3.0, 3.01, 0.25)  # how much easier or harder than the pool a request can be, in log-odds
RENEWED = 0.04  # of the pool: news that change the table
HORIZON = 64  # tokens of a streak that are summed one by one
LOWEST, HIGHEST = 0.005, 0.995  # of a rate


class Acceptance:
    """Measured acceptance of all requests together (the pool) and of each one beside it.

    Two readings of the same counts. If each round starts afresh, a round of d steps yields 1 + S_1 + ... + S_d tokens,
    where S_j is the share of rounds that accept at least j. But real text has streaks: where a chain was accepted to
    its end the next one mostly is too, and a chain that failed would have failed at the same token from wherever it
    started. Then a streak of L tokens takes ceil(L / (d + 1)) rounds, so a round yields E[L] / E[ceil(L / (d + 1))] =
    (sum over k of S_k) / (sum over i of S_(i (d + 1))), with S_k counted from the start of a streak. The acceptance of
    the first token behind an accepted chain, beside that behind a miss, tells which of the two holds.
    """

    def __init__(self, max_steps: int, prior: float) -> None:
        self.max_steps, self.prior = max_steps, prior
        self.tried, self.accepted = np.zeros(max_steps), np.zeros(max_steps)  # by position in the chain
        self.cold_tried, self.cold_accepted = np.zeros(max_steps), np.zeros(max_steps)  # of chains behind a miss
        self.hot_tried, self.hot_accepted = np.zeros(2), np.zeros(2)  # behind an accepted chain: first token, all
        self.usual, self.usual_weight = np.zeros(max_steps), 0.0  # expected to be accepted, of each request by itself
        self.rows: dict[Hashable, int] = {}
        self.free: list[int] = []
        # By row: trials, accepted ones, those that the pool would have accepted; and 1 behind an accepted chain.
        self.requests = np.zeros((4, 16))
        self._steps = np.arange(max_steps)
        depth = np.arange(1, max_steps + 2)  # d + 1
        self._starts = (np.arange(HORIZON)[:, None] % depth == 0).astype(float)  # [k, d]: a round starts at token k
        self._gap = (-HORIZON) % depth  # tokens from the horizon to the next start
        self._depth = depth
        self._table: Array | None = None  # what _make_table gives, of the pool as it was a moment ago
        self._pool_rates = np.zeros(max_steps)
        self._mean = prior  # rate of all positions together
        self._news = 0  # drafts since the table was made

    def update(self, ids: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """The counts of one round; a request that drafted nothing adds nothing."""
        some = [i for i, n in enumerate(drafted) if n > 0]
        if not some:
            return
        rows = np.array([self._row(ids[i]) for i in some])
        length = np.array([drafted[i] for i in some])
        got = np.array([accepted[i] for i in some])
        yes = got[:, None] > self._steps  # [request, position]
        trial = (got[:, None] >= self._steps) & (length[:, None] > self._steps)
        hot = self.requests[3, rows] > 0
        self._current_table()
        keep = np.exp(-len(some) / max(POOL_TRIALS, POOL_ROUNDS * len(some)))
        self.usual = self.usual * keep + len(some) * self._of(rows)
        self.usual_weight = self.usual_weight * keep + len(some)
        for tried, taken, which in (
            (self.tried, self.accepted, slice(None)), (self.cold_tried, self.cold_accepted, ~hot)
        ):
            tried *= keep
            taken *= keep
            tried += trial[which].sum(0)
            taken += yes[which].sum(0)
        self.hot_tried = self.hot_tried * keep + (hot.sum(), trial[hot].sum())
        self.hot_accepted = self.hot_accepted * keep + (yes[hot, 0].sum(), yes[hot].sum())

        counts = np.stack([trial.sum(1), got, trial @ self._pool_rates])
        self.requests[:3, rows] = self.requests[:3, rows] * (1 - 1 / REQUEST_ROUNDS) + counts
        self.requests[3, rows] = got >= length
        self._news += len(some)

    def tokens(self, ids: Sequence[Hashable] | None) -> Array:
        """[max_steps + 1]: expected tokens that these requests make in a round, on average, at each depth.

        They are the pool's, times what the requests are expected to accept beside what those of the rounds before were.
        Without ids the pool's alone.
        """
        table = self._current_table()
        pool = table[SHIFTS.size // 2]
        if not ids or self.usual_weight == 0:
            return pool
        ratio = self._of(np.array([self.rows.get(i, -1) for i in ids])) / (self.usual / self.usual_weight)
        return np.concatenate([pool[:1], 1 + (pool[1:] - 1) * ratio])

    def _of(self, rows: NDArray[np.int64]) -> Array:
        """[max_steps]: tokens that these requests, -1 for a new one, should have accepted at depth 1, 2, ..."""
        table = self._current_table()
        counts = self.requests[:3, rows] * (rows >= 0) + REQUEST_WEIGHT * np.array([[1.0], [self._mean], [self._mean]])
        trials, accepted, expected = np.maximum(counts, 1e-3)
        odds = accepted * np.maximum(trials - expected, 1e-3) / (np.maximum(trials - accepted, 1e-3) * expected)
        place = (np.log(odds) - SHIFTS[0]) / (SHIFTS[1] - SHIFTS[0]) + 0.5
        place = np.minimum(np.maximum(place, 0), SHIFTS.size - 1).astype(int)
        return table[place, 1:].sum(0) / rows.size - 1  # clip() and mean() take longer than all else here

    def _current_table(self) -> Array:
        if self._table is None or self._news > RENEWED * self.tried[0]:
            self._table, self._news = self._make_table(), 0
        return self._table

    def forget(self, request: Hashable) -> None:
        row = self.rows.pop(request, None)
        if row is not None:
            self.free.append(row)

    def _row(self, request: Hashable) -> int:
        row = self.rows.get(request)
        if row is None:
            if not self.free:
                size = self.requests.shape[1]
                if len(self.rows) == size:
                    self.requests = np.concatenate([self.requests, np.zeros((4, size))], axis=1)
                self.free = list(range(self.requests.shape[1] - 1, len(self.rows) - 1, -1))
            row = self.rows[request] = self.free.pop()
            self.requests[:, row] = 0
        return row

    def _make_table(self) -> Array:
        """[shifts, max_steps + 1]: tokens of a round of a request that is so much easier or harder than the pool."""
        self._pool_rates = self._rates(self.tried, self.accepted)
        self._mean = self._rate(float(self.tried.sum()), float(self.accepted.sum()), self.prior)
        afresh = self._survival(self._pool_rates)[:, : self.max_steps + 1].cumsum(1)
        weight = self._streakiness()
        if weight == 0:
            return afresh
        late = self._late_rate()
        rates = self._rates(self.cold_tried, self.cold_accepted, late)
        tail = np.full(HORIZON - self.max_steps, late)
        survival = self._survival(np.concatenate([rates, tail]))  # [shifts, HORIZON + 1]
        last = _shifted(np.array([late]))  # [shifts, 1]
        behind = survival[:, -1:] * last**self._gap / (1 - last**self._depth)
        starts = survival[:, :-1] @ self._starts + behind  # rounds of a streak, at each depth
        return np.exp(weight * np.log(starts[:, :1] / starts) + (1 - weight) * np.log(afresh))

    def _survival(self, rates: Array) -> Array:
        """[shifts, n + 1] from rates [n]: the chance to accept at least 0, 1, ..., n tokens."""
        return np.concatenate([np.ones((SHIFTS.size, 1)), _shifted(rates).cumprod(1)], axis=1)

    def _streakiness(self) -> float:
        """0 where every round starts afresh, 1 where streaks go on as if no round had ended."""
        cold, first, all_hot = self._beginnings()
        gap = all_hot - cold
        return 0.0 if gap < 0.02 else float(np.clip((first - cold) / gap, 0, 1))

    def _late_rate(self) -> float:
        """Of a token late in a streak.

        The target's own token behind an accepted chain is not tried: it ends the streak like any other, with 1 - x.
        So the first token behind it has the rate x * x + (1 - x) * cold, of which this is the root.
        """
        cold, first, _ = self._beginnings()
        return (cold + math.sqrt(max(cold**2 + 4 * (first - cold), 0.0))) / 2

    def _beginnings(self) -> tuple[float, float, float]:
        """Rates of the first token behind a miss, of that behind an accepted chain, and of all in such rounds."""
        cold = self._rate(float(self.cold_tried[0]), float(self.cold_accepted[0]), self.prior)
        first, all_hot = (
            self._rate(n, a, cold) for n, a in zip(self.hot_tried.tolist(), self.hot_accepted.tolist())
        )
        return cold, first, all_hot

    def _rates(self, tried: Array, accepted: Array, towards: float | None = None) -> Array:
        """By position: accepted / tried. Where there is little to go by, the rate of the position before, or half-way
        from it to `towards`."""
        rates, rate = np.empty(self.max_steps), self.prior
        for j, (n, a) in enumerate(zip(tried.tolist(), accepted.tolist())):
            rates[j] = rate = self._rate(n, a, rate if towards is None or j == 0 else (rate + towards) / 2)
        return rates

    def _rate(self, tried: float, accepted: float, otherwise: float) -> float:
        return (accepted + PRIOR_WEIGHT * otherwise) / (tried + PRIOR_WEIGHT)

    def to_dict(self) -> dict[str, Any]:
        return {
            "pool": {name: getattr(self, name).tolist() for name in POOL},
            "usual_weight": self.usual_weight,
            "table": None if self._table is None else self._table.tolist(),
            "pool_rates": self._pool_rates.tolist(),
            "mean": self._mean,
            "news": self._news,
            "requests": [[request, self.requests[:, row].tolist()] for request, row in self.rows.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        for name in POOL:
            setattr(self, name, np.array(state["pool"][name], dtype=float))
        for request, values in state["requests"]:
            self.requests[:, self._row(request)] = values
        self.usual_weight, self._mean, self._news = state["usual_weight"], state["mean"], state["news"]
        self._table = None if state["table"] is None else np.array(state["table"])
        self._pool_rates = np.array(state["pool_rates"])


POOL = ("tried", "accepted", "cold_tried", "cold_accepted", "hot_tried", "hot_accepted", "usual")


def _shifted(rates: Array) -> Array:
    """[shifts, n] from rates [n]: each with its log-odds shifted."""
    clipped = rates.clip(LOWEST, HIGHEST)
    odds = clipped / (1 - clipped) * np.exp(SHIFTS)[:, None]
    return (odds / (1 + odds)).clip(LOWEST, HIGHEST)
