"""A record as rows, one for each case with everything that ran it; and how its parts are written, in every table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .case import Case, Result
from .record import Record, Run

OURS = "mtp"
REFERENCE = "reference"
# What a case can be set to beside its sizes: said once for all rows, and again in the rows that differ.
SETTINGS = ("dtype", "kv_dtype", "page_size", "layout", "mode", "warm", "num_steps", "topk")
OF_A_ROUND = ("num_steps", "topk")  # of these, what only a round has


@dataclass(frozen=True)
class Row:
    """A case and the result of each candidate on it."""

    case: Case
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def ours(self) -> Result | None:
        return self.results.get(OURS)

    @property
    def floor_us(self) -> float | None:
        return next((r.floor_us for r in self.results.values() if r.floor_us is not None), None)

    @property
    def peers(self) -> list[Result]:
        """Those with a time, the quickest first."""
        found = [r for name, r in self.results.items() if name != OURS and has_time(r)]
        return sorted(found, key=time_of)

    @property
    def best_peer(self) -> Result | None:
        return next(iter(self.peers), None)


def rows_of(record: Record) -> list[Row]:
    """One row a case, in the record's order. Of two results of one candidate on one case the later counts."""
    rows: dict[Case, Row] = {}
    for result in record.results:
        rows.setdefault(result.case, Row(result.case)).results[result.candidate] = result
    return list(rows.values())


def candidates_of(rows: Iterable[Row]) -> list[str]:
    """Every candidate with a time somewhere, ours first, the others in the order in which they appear."""
    names = dict.fromkeys(name for row in rows for name, result in row.results.items() if has_time(result))
    return sorted(names, key=lambda name: name != OURS)


def has_time(result: Result | None) -> bool:
    return result is not None and result.status == "ok" and result.us is not None


def time_of(result: Result) -> float:
    if result.us is None:
        raise ValueError(f"{result.candidate} has no time for {result.case}")
    return result.us


def case_name(case: Case) -> str:
    return f"{case.name} {case.variant}".rstrip()


def common_settings(cases: Iterable[Case]) -> dict[str, Any]:
    """The most frequent value of each setting; Case's own default wins a tie."""
    found = list(cases)
    common = {}
    for name in SETTINGS:
        counts = Counter(getattr(case, name) for case in found)
        default = Case.__dataclass_fields__[name].default
        common[name] = max(counts, key=lambda value: (counts[value], value == default), default=default)
    return common


def shared_settings(cases: Iterable[Case]) -> str:
    """The common settings in words, for a title: those that mean something for these cases.

    A tree's topk is left to its rows. Only single ops rotate their inputs, so that the cache is cold.
    """
    found = list(cases)
    rounds = any(case.level == "round" for case in found)
    ops = all(case.level == "op" for case in found)
    names = [name for name in SETTINGS if name not in OF_A_ROUND or (rounds and name == "num_steps")]
    return settings_text(common_settings(found), [name for name in names if ops or name != "warm"])


def settings_text(values: Mapping[str, Any], names: Iterable[str] = SETTINGS) -> str:
    words = {
        "dtype": lambda v: v,
        "kv_dtype": lambda v: f"KV {v}",
        "page_size": lambda v: f"page {v}",
        "layout": lambda v: v,
        "mode": lambda v: v,
        "warm": lambda v: "warm cache" if v else "cold cache",
        "num_steps": lambda v: f"{v} steps",
        "topk": lambda v: f"topk {v}",
    }
    return ", ".join(words[name](values[name]) for name in names)


def unusual_settings(case: Case, common: Mapping[str, Any]) -> str:
    """How a case differs from the common settings, in words; not a topk that its number of rows says already."""
    values = {name: getattr(case, name) for name in SETTINGS}
    said = {"topk"} if case.topk == case.rows else set()
    return settings_text(values, [name for name in SETTINGS if values[name] != common[name] and name not in said])


def us_text(us: float | None) -> str:
    """Microseconds with about three digits: 0.25, 7.6, 171, 4328."""
    if us is None:
        return ""
    if 0 < us < 0.005:
        return "<0.01"
    return f"{us:.2f}" if us < 1 else f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def ratio_text(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def over(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def bandwidth_text(bytes_per_second: float) -> str:
    terabytes = bytes_per_second / 1e12
    return f"{terabytes:.2f} TB/s" if terabytes >= 1 else f"{bytes_per_second / 1e9:.1f} GB/s"


def facts(run: Run) -> list[tuple[str, str]]:
    """Where and how a record was measured, as pairs of a name and a text."""
    teraflops = run.flops_per_second / 1e12
    present = [f"{p.name} {p.version}".rstrip() for p in run.peers if not p.why_absent]
    absent = [f"{p.name} ({p.why_absent})" for p in run.peers if p.why_absent]
    found = [
        ("device", f"{run.device_name} ({run.device})" if run.device_name != run.device else run.device),
        *((name.replace("_", " "), _plain(value)) for name, value in run.machine.items()),
        ("commit", run.commit),
        ("date", run.date),
        ("copy bandwidth", f"{bandwidth_text(run.copy_bandwidth)}, read plus written, measured in this run"),
        ("read bandwidth", f"{bandwidth_text(run.read_bandwidth)}, measured in this run"),
        ("matrix product", f"{teraflops:.0f} TFLOP/s" if teraflops >= 10 else f"{teraflops * 1e3:.0f} GFLOP/s"),
        ("a graph's node", "" if run.node_us is None else f"{run.node_us:.2f} us, one small dependent kernel"),
        ("peers", ", ".join(present) or "none"),
        ("absent", ", ".join(absent)),
        ("command", run.command),
    ]
    return [(name, text) for name, text in found if text]


def _plain(value: Any) -> str:
    """A value of the machine's description: nested ones as `name value, name value`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{str(k).replace('_', ' ')} {_plain(v)}" for k, v in value.items() if v not in (None, ""))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return "" if value is None else str(value)
