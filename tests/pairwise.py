"""All pairs: a short list of cases in which every two values of different axes meet. All values: of given cases."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = tuple[str, Any, str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases by axis. Greedy: each starts with a pair that has not met yet, and takes, axis by axis, the value that
    meets most others for the first time; of several, any (the same in every process)."""
    missing: dict[Pair, None] = {
        (a, x, b, y): None for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]
    }
    dice = random.Random(0)
    cases = []
    while missing:
        first, x, second, y = next(iter(missing))
        case = {first: x, second: y}
        for axis in axes:
            if axis not in case:
                news = {value: sum(p in missing for p in _pairs(axes, {**case, axis: value})) for value in axes[axis]}
                case[axis] = max(news, key=lambda value: (news[value], dice.random()))
        for pair in _pairs(axes, case):
            missing.pop(pair, None)
        cases.append({axis: case[axis] for axis in axes})
    return cases


def meet_all_values(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of cases in which every value of every axis is met that is in any case. Greedy: the first of those in
    which most are met for the first time."""
    met_by = [{*case.items()} for case in cases]
    missing, chosen = set().union(*met_by), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(met_by[i] & missing))
        missing -= met_by[best]
        chosen.append(best)
    return sorted(chosen)


def _pairs(axes: Mapping[str, Sequence[Any]], case: Mapping[str, Any]) -> list[Pair]:
    """The pairs of a case, which may lack axes, named in the order of the axes."""
    return [(a, case[a], b, case[b]) for a, b in combinations(axes, 2) if a in case and b in case]
