"""What changed between two records, beyond noise.

The rule. A result is one candidate on one case. With medians a and b, and each run's half width h = (p90 - p10) / 2, it
is slower or faster when

    |b - a| > max(floor * min(a, b), sqrt(h_a^2 + h_b^2))

`floor` (5% by default) covers what differs between two runs but not within one: clocks, temperature, placement. The
second term is the spread that the runs saw themselves: half of the p10-p90 interval is about 1.3 standard deviations of
a sample. A result that lost its time is worse than any slower one, and becoming wrong is the worst.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .case import Case, Result
from .display import case_cell, new_table
from .record import Record, Run
from .rows import OURS, bandwidth_text, common_settings, has_time, rows_of, us_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

FLOOR = 0.05
# From the worst to the best: the order of the table.
KINDS = (
    "now wrong",
    "now error",
    "now unsupported",
    "slower",
    "only in A",
    "only in B",
    "has a time now",
    "faster",
    "same",
)
BAD = frozenset(KINDS[:4])


@dataclass(frozen=True)
class Change:
    """One candidate on one case in A and in B; `kind` is one of KINDS."""

    case: Case
    candidate: str
    kind: str
    a: Result | None
    b: Result | None

    @property
    def ratio(self) -> float | None:
        """B's time over A's."""
        before, after = _time(self.a), _time(self.b)
        return after / before if before and after is not None else None


def compare(a: Record, b: Record, floor: float = FLOOR) -> list[Change]:
    """Match the results of two records by case and candidate and classify each by the rule above."""
    if not (math.isfinite(floor) and floor >= 0):
        raise ValueError(f"compare: floor: expected a finite number >= 0, got {floor}")
    before, after = _by_key(a), _by_key(b)
    changes = []
    for case, candidate in dict.fromkeys([*before, *after]):
        one, two = before.get((case, candidate)), after.get((case, candidate))
        changes.append(Change(case, candidate, _kind(one, two, floor), one, two))
    return changes


def exit_code(changes: list[Change]) -> int:
    """1 if anything of ours got slower or lost its time. A peer's change does not count: its code is not ours."""
    return int(any(change.candidate == OURS and change.kind in BAD for change in changes))


def differences(a: Run, b: Run) -> list[str]:
    """What makes the two runs hard to compare, the gravest first."""
    found = []
    if a.device_name != b.device_name:
        found.append(f"DIFFERENT DEVICES: A is {a.device_name}, B is {b.device_name}; times say little about the code")
    for name in sorted({*a.machine, *b.machine}):
        if a.machine.get(name) != b.machine.get(name):
            found.append(f"{name}: {a.machine.get(name)} in A, {b.machine.get(name)} in B")
    for what, one, two in (("copy", a.copy_bandwidth, b.copy_bandwidth), ("read", a.read_bandwidth, b.read_bandwidth)):
        if abs(one - two) > FLOOR * min(one, two):
            found.append(f"{what} bandwidth: {bandwidth_text(one)} in A, {bandwidth_text(two)} in B")
    versions = {p.name: p.version for p in a.peers if not p.why_absent}
    for peer in b.peers:
        if not peer.why_absent and versions.get(peer.name, peer.version) != peer.version:
            found.append(f"{peer.name}: version {versions[peer.name]} in A, {peer.version} in B")
    return found


def show(console: Console, changes: list[Change], runs: tuple[Run, Run] | None = None) -> None:
    """Print what changed, the worst first; `runs` are those of A and B, for what differs between the machines."""
    from rich.text import Text

    if runs is not None:
        _show_runs(console, *runs)
    common = common_settings(change.case for change in changes)
    table = new_table()
    for name in ("candidate", "level", "case", "model"):
        table.add_column(name, overflow="fold")
    for name in ("batch", "ctx", "rows", "A us", "B us", "B / A"):
        table.add_column(name, justify="right")
    table.add_column("change", no_wrap=True)
    for change in sorted((c for c in changes if c.kind != "same"), key=_rank):
        case = change.case
        table.add_row(
            _who(change),
            case.level,
            case_cell(case, common),
            Text(case.model),
            *map(str, (case.batch, case.context, case.rows)),
            _cell(change.a),
            _cell(change.b),
            "" if change.ratio is None else f"{change.ratio:.2f}",
            Text(change.kind, style=_style(change)),
        )
    if table.row_count:
        console.print(table)
    for line in _summary(changes):
        console.print(line, highlight=False)


def _by_key(record: Record) -> dict[tuple[Case, str], Result]:
    return {(row.case, name): result for row in rows_of(record) for name, result in row.results.items()}


def _kind(a: Result | None, b: Result | None, floor: float) -> str:
    if b is None:
        return "only in A"
    if a is None:
        return "only in B"
    if not has_time(b):
        # A result that stays without a time still has got worse when it is wrong now.
        worse = has_time(a) or (b.status != a.status and b.status in ("wrong", "error"))
        return f"now {b.status if b.status in ('wrong', 'unsupported') else 'error'}" if worse else "same"
    if not has_time(a):
        return "has a time now"
    before, after = a.us or 0.0, b.us or 0.0
    noise = max(floor * min(before, after), math.hypot(_half_width(a), _half_width(b)))
    if abs(after - before) <= noise:
        return "same"
    return "slower" if after > before else "faster"


def _half_width(result: Result) -> float:
    return 0.0 if result.p10 is None or result.p90 is None else (result.p90 - result.p10) / 2


def _time(result: Result | None) -> float | None:
    return result.us if result is not None and has_time(result) else None


def _rank(change: Change) -> tuple[int, bool, float]:
    """The worst kind first, ours before peers, the largest ratio first."""
    return KINDS.index(change.kind), change.candidate != OURS, -(change.ratio or 0.0)


def _style(change: Change) -> str:
    if change.kind in BAD:
        return "bold red" if change.candidate == OURS else "red"
    return "green" if change.kind in ("faster", "has a time now") else "dim"


def _who(change: Change) -> Text:
    """The candidate, and for ours what served it: another implementation explains another time."""
    from rich.text import Text

    served = list(dict.fromkeys(r.implementation for r in (change.a, change.b) if r is not None and r.implementation))
    return Text(f"{change.candidate} ({' -> '.join(served)})" if served else change.candidate)


def _cell(result: Result | None) -> str:
    if result is None:
        return "-"
    return us_text(result.us) if has_time(result) else result.status


def _show_runs(console: Console, a: Run, b: Run) -> None:
    from rich.panel import Panel
    from rich.text import Text

    for name, run in (("A", a), ("B", b)):
        console.print(Text(f"{name}: {run.device_name}, commit {run.commit}, {run.date}"))
    found = differences(a, b)
    if found:
        grave = a.device_name != b.device_name
        style = "bold red" if grave else "yellow"
        console.print(Panel(Text("\n".join(found)), title="the runs differ", title_align="left", border_style=style))


def _summary(changes: list[Change]) -> list[str]:
    lines = []
    for who, mine in (("ours", True), ("peers", False)):
        counts = Counter(c.kind for c in changes if (c.candidate == OURS) == mine)
        text = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
        lines.append(f"{who}: {text or 'no results'}")
    moved = sum(c.candidate != OURS and c.kind in ("slower", "faster") for c in changes)
    if moved:
        lines.append(
            f"{moved} results of peers moved. They do not count: no kernel of this library is in them, so they point "
            "at the machine's noise or at other versions, and ours may have moved for the same reason."
        )
    return lines
