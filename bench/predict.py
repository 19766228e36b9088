"""What other GPUs would take: a model of two terms, with its error against the record that it comes from.

    time = nodes * node_us + slowdown * bytes / bandwidth
    bandwidth of a target = its datasheet's * (measured copy bandwidth of the record's GPU / that one's datasheet)

`nodes` are the kernels in the captured graph, `bytes` what must move. In the plain form node_us is the cost of one
small dependent kernel measured in the run and slowdown is 1: about the least that a candidate with these kernels can
take. Real kernels take longer, so both are also fitted by least squares on the relative errors, both >= 0, for each
level, name and candidate. The fit is used where it predicts better than the plain form when each result is left out in
turn; the error reported is that of the left-out results. On a target, node_us stays what it is and only the term of the
bytes scales.

Not modelled: arithmetic (drafting is bound by memory and launches), and caches: where the bytes fit a target's L2 and
nothing evicts them between calls, it can be faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .case import LEVELS, Case, Result
from .display import case_cell, new_table
from .gpus import GPUS, gpu_of
from .record import Record
from .rows import OURS, bandwidth_text, common_settings, has_time, rows_of, shared_settings, time_of, us_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MIN_FIT = 4  # results: twice the number of unknowns


class PredictionError(ValueError):
    """Why there is no prediction."""


@dataclass(frozen=True)
class Model:
    """The two terms' constants, for one level, name and candidate."""

    node_us: float
    slowdown: float
    fitted: bool

    def us(self, result: Result, bandwidth: float) -> float:
        return (result.nodes or 0) * self.node_us + self.slowdown * result.bytes / bandwidth * 1e6


@dataclass(frozen=True)
class Predicted:
    """One result of the record, and what the model says of it here and on the target."""

    result: Result
    model: Model
    checked_us: float  # on the record's own GPU; without this result in the fit, where there is one
    plain_us: float  # by the plain form, on the record's own GPU
    target_us: float
    target_floor_us: float
    fits_l2: bool  # the bytes fit the target's L2


@dataclass(frozen=True)
class Error:
    """|predicted - measured| / measured over the results of one level."""

    level: str
    count: int
    median: float
    p90: float
    plain_median: float
    plain_p90: float


@dataclass(frozen=True)
class Prediction:
    """Everything that `predict` found."""

    source: str  # keys of GPUS
    target: str
    source_bandwidth: float  # bytes/s: measured
    target_bandwidth: float  # and expected
    results: list[Predicted]
    errors: list[Error]
    left_out: dict[str, int]  # "candidate: why" and how many results


def predict(record: Record, target: str) -> Prediction:
    """Predict every result of `record` on `target`, a key of GPUS."""
    if target not in GPUS:
        raise PredictionError(f"predict: target: expected one of {', '.join(GPUS)}, got {target!r}")
    run = record.run
    source = gpu_of(run.device_name)
    if source is None:
        raise PredictionError(f"predict: record: expected one of {', '.join(GPUS)}, got one of {run.device_name!r}")
    if run.node_us is None or run.copy_bandwidth <= 0:
        raise PredictionError("predict: record: expected node_us and copy_bandwidth measured in its run, got none")
    bandwidth = run.copy_bandwidth * GPUS[target].bandwidth / GPUS[source].bandwidth
    plain = Model(run.node_us, 1.0, fitted=False)
    usable, left_out = _usable(record)
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in usable:
        groups.setdefault((result.case.level, result.case.name, result.candidate), []).append(result)
    models = {key: _choose(found, plain, run.copy_bandwidth) for key, found in groups.items()}
    checks = {id(r): us for key, found in groups.items() for r, us in zip(found, models[key][1])}
    results = [
        Predicted(
            r,
            model := models[r.case.level, r.case.name, r.candidate][0],
            checks[id(r)],
            plain.us(r, run.copy_bandwidth),
            model.us(r, bandwidth),
            r.bytes / bandwidth * 1e6,
            r.bytes <= GPUS[target].l2_bytes,
        )
        for r in usable
    ]
    by_level = {level: [p for p in results if p.result.case.level == level] for level in LEVELS}
    errors = [_error(level, found) for level, found in by_level.items() if found]
    return Prediction(source, target, run.copy_bandwidth, bandwidth, results, errors, left_out)


def _usable(record: Record) -> tuple[list[Result], dict[str, int]]:
    """The results that the model can say something of; of the others with a time, why not."""
    usable: list[Result] = []
    left_out: dict[str, int] = {}
    for result in (r for row in rows_of(record) for r in row.results.values() if has_time(r) and time_of(r) > 0):
        why = ""
        if result.nodes is None:
            why = "not in a CUDA graph, so its kernels are not counted"
        elif result.case.warm:
            why = "measured with a warm cache, which the bytes model does not cover"
        if why:
            left_out[f"{result.candidate}: {why}"] = left_out.get(f"{result.candidate}: {why}", 0) + 1
        else:
            usable.append(result)
    return usable, left_out


def _choose(results: Sequence[Result], plain: Model, bandwidth: float) -> tuple[Model, list[float]]:
    """The better form, and what it says of each result without having seen it."""
    plain_us = [plain.us(r, bandwidth) for r in results]
    if len(results) < MIN_FIT:
        return plain, plain_us
    blind = [_fit([*results[:i], *results[i + 1 :]], bandwidth).us(r, bandwidth) for i, r in enumerate(results)]
    if np.median(_deviations(results, blind)) >= np.median(_deviations(results, plain_us)):
        return plain, plain_us
    return _fit(results, bandwidth), blind


def _fit(results: Sequence[Result], bandwidth: float) -> Model:
    """node_us and slowdown, both >= 0, of the least sum of squared relative errors."""
    terms = np.array([[r.nodes or 0, r.bytes / bandwidth * 1e6] for r in results]) / [[time_of(r)] for r in results]
    ones = np.ones(len(results))
    candidates = []
    for columns in ([0, 1], [0], [1]):
        solution = np.zeros(2)
        solution[columns] = np.linalg.lstsq(terms[:, columns], ones, rcond=None)[0]
        if (solution >= 0).all():
            candidates.append(solution)
    best = min(candidates, key=lambda solution: float(((terms @ solution - ones) ** 2).sum()))
    return Model(float(best[0]), float(best[1]), fitted=True)


def _deviations(results: Iterable[Result], predicted: Iterable[float]) -> list[float]:
    return [abs(us - time_of(r)) / time_of(r) for r, us in zip(results, predicted)]


def _error(level: str, found: Sequence[Predicted]) -> Error:
    results = [p.result for p in found]
    checked = _deviations(results, [p.checked_us for p in found])
    plain = _deviations(results, [p.plain_us for p in found])
    (median, p90), (plain_median, plain_p90) = (np.quantile(d, (0.5, 0.9)).tolist() for d in (checked, plain))
    return Error(level, len(found), median, p90, plain_median, plain_p90)


def show(console: Console, prediction: Prediction) -> None:
    """Print a prediction; its error comes first."""
    source, target = prediction.source, prediction.target
    console.print(
        f"[bold]Predicted for {target}, not measured[/]: {bandwidth_text(prediction.target_bandwidth)} expected, from "
        f"the {bandwidth_text(prediction.source_bandwidth)} measured on {source} and the ratio of their datasheets."
    )
    if not prediction.results:
        console.print("Nothing to predict: no result has a time and a count of its graph's kernels.")
    for error in prediction.errors:
        console.print(
            f"  {error.level}: error on {source} itself, {error.count} results: median {error.median:.0%}, p90 "
            f"{error.p90:.0%} (measured launch cost and bytes alone: {error.plain_median:.0%}, {error.plain_p90:.0%})"
        )
    for why, count in prediction.left_out.items():
        console.print(f"  left out: {count} of {why}", highlight=False)
    for error in prediction.errors:
        found = [p for p in prediction.results if p.result.case.level == error.level]
        console.print()
        console.print(_table(prediction, found, error))
    if any(p.fits_l2 for p in prediction.results):
        console.print(f"*: the bytes fit {target}'s L2; with nothing between the calls they can be faster than this.")


def _table(prediction: Prediction, found: Sequence[Predicted], error: Error) -> Table:
    """A row for each case, a column for each candidate."""
    from rich.text import Text

    names = sorted(dict.fromkeys(p.result.candidate for p in found), key=lambda name: name != OURS)
    rows: dict[Case, dict[str, Predicted]] = {}
    for p in found:
        rows.setdefault(p.result.case, {})[p.result.candidate] = p
    common = common_settings(rows)
    stated = f"median error on {prediction.source}: {error.median:.0%}"
    table = new_table(f"{error.level} on {prediction.target}, predicted us ({stated}): {shared_settings(rows)}")
    for name in ("case", "model"):
        table.add_column(name, overflow="fold")
    for name in ("batch", "ctx", "rows", "floor", *names):
        table.add_column(name, justify="right")
    for case, by_name in rows.items():
        first = next(iter(by_name.values()))
        table.add_row(
            case_cell(case, common),
            Text(case.model),
            *map(str, (case.batch, case.context, case.rows)),
            us_text(first.target_floor_us) + "*" * first.fits_l2,
            *(us_text(by_name[name].target_us) if name in by_name else "" for name in names),
        )
    return table
