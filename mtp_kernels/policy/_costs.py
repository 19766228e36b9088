"""What a round costs: a given model of the seconds to start from, corrected by what rounds have really taken."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops._checks import fail, require

Array = NDArray[np.float64]

SHORTEST = 1e-9  # seconds that anything can take; what measured less was not measured
SLOWEST = 0.02  # of the difference to a new measurement that a known cost takes over, at the least
DRIFT = 0.08  # and that all costs take over together: contexts grow, others share the GPU
LARGEST = math.log(1.25)  # of a surprise upwards that counts: a round in which a kernel was compiled says nothing
FIRST = math.log(1.5)  # of the first surprise at a depth
MOST_KNOWN = 4096  # batches whose modelled seconds are kept
PATIENCE = 3  # surprises upwards in a row until they count in full


@dataclass(frozen=True)
class CostModel:
    """Seconds of drafting and of verifying, as points of piecewise linear curves; only their proportions matter much.

    A curve is level in front of its first point and goes on behind the last as between the last two. The policy
    corrects it by what it measures, so a rough model only makes the first rounds rough.

    Args:
        draft_step: (batch, seconds of one draft step) points, ascending.
        verify: (tokens of all requests together, seconds of the target's forward) points, ascending.

    Raises:
        ArgumentError: no points, points that do not ascend, or seconds that are not positive.

    >>> model = CostModel(draft_step=[(1, 1e-3), (64, 2e-3)], verify=[(1, 20e-3), (256, 20e-3), (512, 40e-3)])
    >>> model.draft_seconds(batch=1, num_steps=4), round(model.verify_seconds(tokens=384), 6)
    (0.004, 0.03)
    """

    draft_step: Sequence[tuple[float, float]]
    verify: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        for name in ("draft_step", "verify"):
            points = tuple((float(x), float(y)) for x, y in getattr(self, name))
            require(len(points) > 0, "CostModel", name, "at least one point", "none")
            for (x, _), (z, _) in pairwise(points):
                require(x < z, "CostModel", name, "ascending points", f"{x:g} before {z:g}")
            for x, y in points:
                good = math.isfinite(x) and x > 0 and math.isfinite(y) and y > 0
                require(good, "CostModel", name, "positive finite numbers", (x, y))
            object.__setattr__(self, name, points)

    def draft_seconds(self, batch: float, num_steps: int) -> float:
        """Seconds to draft `num_steps` tokens for each of `batch` requests."""
        return num_steps * _at(self.draft_step, batch)

    def verify_seconds(self, tokens: float) -> float:
        """Seconds of the target's forward over so many tokens."""
        return _at(self.verify, tokens)


# A target that is bound by memory up to 256 tokens, and an assistant of a twentieth of it: nobody's, to start from.
DEFAULT = CostModel(draft_step=[(1, 0.05), (64, 0.05), (128, 0.1)], verify=[(1, 1.0), (256, 1.0), (512, 2.0)])


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    behind = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[behind - 1 : behind + 1]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.01 * y1)


class RoundCosts:
    """Estimated seconds of a round by batch and depth: the model's, times corrections that are learnt.

    A correction is a logarithm: of the batch's row (batches of about the same size share one) at this depth, and one
    that all have in common. A depth that was never tried takes its row's nearest ones, a new row those of the nearest.
    """

    def __init__(self, max_steps: int, model: CostModel) -> None:
        self.max_steps, self.model = max_steps, model
        self.verify, self.draft = _Corrections(max_steps), _Corrections(max_steps)
        self._known: dict[tuple[int, int], tuple[Array, Array]] = {}

    def predict(self, batch: int, drafting: int) -> tuple[Array, Array]:
        """Seconds of drafting and of verifying at each depth 0 to max_steps, `drafting` of the `batch` requests."""
        draft, verify = self._modelled(batch, drafting)
        return draft * np.exp(self.draft.at(batch)), verify * np.exp(self.verify.at(batch))

    def _modelled(self, batch: int, drafting: int) -> tuple[Array, Array]:
        found = self._known.get((batch, drafting))
        if found is None:
            steps = range(self.max_steps + 1)
            draft = np.array([self.model.draft_seconds(batch, d) for d in steps])
            verify = np.array([self.model.verify_seconds(batch + drafting * d) for d in steps])
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[batch, drafting] = (draft, verify)
        return found

    def update(self, batch: int, tokens: int, num_steps: int, draft_seconds: float, verify_seconds: float) -> None:
        expected = self.model.verify_seconds(tokens)
        self.verify.update(batch, num_steps, math.log(verify_seconds / expected))
        if not self.draft.started:  # until it is measured, drafting keeps its proportion to verifying
            self.draft.common = self.verify.common
        if num_steps > 0 and draft_seconds >= SHORTEST:
            self.draft.update(batch, num_steps, math.log(draft_seconds / self.model.draft_seconds(batch, num_steps)))

    def reach(self, batch: int) -> int:
        """The deepest depth that was measured at about this batch, or at the batches nearest to it; -1 for none."""
        return self.verify.row(batch).reach

    def to_dict(self) -> dict[str, Any]:
        return {"model": asdict(self.model), "verify": self.verify.to_dict(), "draft": self.draft.to_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.verify.load(state["verify"])
        self.draft.load(state["draft"])


@dataclass
class _Row:
    base: Array  # [depths] taken over from the row next to it
    own: Array  # [depths] learnt; counts where tries > 0
    tries: Array  # [depths]
    slow: Array  # [depths] how often in a row it was much slower than expected
    reach: int = -1  # the deepest depth measured here, or where the base came from
    _values: Array | None = None  # as they were since the last `learn`

    def learn(self, depth: int, value: float) -> None:
        self.own[depth] = value
        self.tries[depth] += 1
        self.reach = max(self.reach, depth)
        self._values = None

    def values(self) -> Array:
        if self._values is None:
            self._values = self._make_values()
        return self._values

    def _make_values(self) -> Array:
        if self.tries.all():
            return self.own
        known = np.flatnonzero(self.tries)
        if known.size == 0:
            return self.base
        depths = np.arange(self.tries.size)
        learnt = np.interp(depths, known, (self.own - self.base)[known])
        if known.size > 1:  # what grew from one depth to the next, beyond the model, goes on growing
            last, before = known[-1], known[-2]
            slope = max(0.0, (learnt[last] - learnt[before]) / (last - before))
            learnt += slope * np.maximum(depths - last, 0)
        return self.base + learnt


class _Corrections:
    """Logarithms of measured / modelled seconds, by batch and depth."""

    def __init__(self, max_steps: int) -> None:
        self.depths = max_steps + 1
        self.common, self.started = 0.0, False
        self.rows: dict[int, _Row] = {}

    def at(self, batch: int) -> Array:
        return self.common + self.row(batch).values()

    def row(self, batch: int) -> _Row:
        key = row_of(batch)
        row = self.rows.get(key)
        if row is None:
            near = min(self.rows, key=lambda other: (abs(other - key), other), default=None)
            base = np.zeros(self.depths) if near is None else self.rows[near].values().copy()
            reach = -1 if near is None else self.rows[near].reach
            own, tries, slow = (np.zeros(self.depths) for _ in range(3))
            row = self.rows[key] = _Row(base, own, tries, slow, reach)
        return row

    def update(self, batch: int, depth: int, measured: float) -> None:
        row = self.row(batch)
        if not self.started:
            self.common, self.started = measured, True
        known = row.values()[depth]
        surprise = measured - self.common - known
        tries = row.tries[depth]
        row.slow[depth] = row.slow[depth] + 1 if surprise > LARGEST else 0
        if row.slow[depth] < PATIENCE:
            surprise = min(surprise, FIRST if tries == 0 else LARGEST)
        # Far faster than ever: what was known came from a slow exception.
        gain = 1.0 if surprise < -FIRST else max(1 / (tries + 1), SLOWEST)
        row.learn(depth, known + gain * surprise)
        if tries >= PATIENCE:
            self.common += DRIFT * (1 - gain) * surprise

    def to_dict(self) -> dict[str, Any]:
        rows = {
            str(key): [row.base.tolist(), row.own.tolist(), row.tries.tolist(), row.slow.tolist(), row.reach]
            for key, row in self.rows.items()
        }
        return {"common": self.common, "started": self.started, "rows": rows}

    def load(self, state: dict[str, Any]) -> None:
        self.common, self.started = state["common"], state["started"]
        self.rows = {
            int(key): _Row(_array(base), _array(own), _array(tries), _array(slow), reach)
            for key, (base, own, tries, slow, reach) in state["rows"].items()
        }


def row_of(batch: int) -> int:
    """Batches that share a row: each has its own up to 8, then eight rows for each doubling."""
    return batch if batch <= 8 else round(8 * math.log2(batch)) - 16


def _array(values: Sequence[float]) -> Array:
    return np.array(values, dtype=float)


def check_seconds(where: str, name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        fail(where, name, "a finite number of seconds >= 0", value)
