"""A record in the terminal: where it was measured, a table for each level, and why a candidate has no time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .case import LEVELS, Case, Result
from .record import Record, Run
from .rows import (
    OURS,
    REFERENCE,
    Row,
    case_name,
    common_settings,
    facts,
    has_time,
    over,
    ratio_text,
    rows_of,
    shared_settings,
    unusual_settings,
    us_text,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

UNITS = {"op": "a call", "step": "a step", "round": "a round", "generate": "a token"}
WIDE = 110  # columns from which there is room for the floor, the spread and what served ours


def show_record(console: Console, record: Record) -> None:
    """Print a record; reads best from 120 columns."""
    from rich.markup import escape

    console.print(_header(record.run))
    rows = rows_of(record)
    for level in dict.fromkeys([*LEVELS, *(row.case.level for row in rows)]):
        found = [row for row in rows if row.case.level == level]
        if not found:
            continue
        console.print()
        settings = shared_settings(row.case for row in found)
        console.print(f"[bold]{level}[/], microseconds {UNITS.get(level, 'a call')}: {settings}")
        console.print(_generate(found) if level == "generate" else _table(found, console.width >= WIDE))
        note = _reference_note(found)
        if note:
            console.print(note, style="yellow")
        for line in _without_time(found):
            console.print(f"  {escape(line)}", highlight=False)


@dataclass(frozen=True)
class Progress:
    """What `progress` hands out: `advance` says what is measured now, and that what was before is done."""

    advance: Callable[[str], None]


@contextmanager
def progress(console: Console, total: int) -> Iterator[Progress]:
    """A bar that vanishes at the end; nothing at all where the console is not a terminal."""
    if not console.is_terminal:
        yield Progress(lambda description: None)
        return
    from rich import progress as rich_progress
    from rich.markup import escape

    columns = (
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.description}"),
    )
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        started = False

        def advance(description: str) -> None:
            nonlocal started
            bar.update(task, advance=1 if started else 0, description=escape(description))
            started = True

        yield Progress(advance)


def _header(run: Run) -> Panel:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in facts(run):
        grid.add_row(Text(name), Text(text))
    return Panel(grid, title="mtp-kernels bench", title_align="left")


def _table(rows: list[Row], wide: bool) -> Table:
    from rich.text import Text

    common = common_settings(row.case for row in rows)
    table = new_table()
    table.add_column("case", overflow="fold")
    table.add_column("model", no_wrap=True)
    for name in ("batch", "ctx", "rows", *(["floor\nus"] if wide else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ours us\n(p10-p90)" if wide else "ours us", justify="right")
    if wide:
        table.add_column("served by", overflow="fold")
    table.add_column("ours /\nfloor", justify="right", no_wrap=True)
    table.add_column("best peer\nus", justify="right", overflow="fold")
    table.add_column("peer /\nours", justify="right", no_wrap=True)
    for row in rows:
        case, ours, peer = row.case, row.ours, row.best_peer
        us = ours.us if ours is not None and has_time(ours) else None
        ratio = over(peer.us if peer else None, us)
        table.add_row(
            case_cell(case, common),
            Text(case.model),
            *map(str, (case.batch, case.context, case.rows)),
            *([us_text(row.floor_us)] if wide else []),
            _time_cell(ours, wide),
            *([_server_cell(ours)] if wide else []),
            ratio_text(over(us, row.floor_us)),
            Text(f"{peer.candidate} {us_text(peer.us)}" if peer else "none"),
            Text(ratio_text(ratio), style="" if ratio is None else "green" if ratio > 1 else "red"),
        )
    return table


def _generate(rows: list[Row]) -> Table:
    """Whole decoding has few cases and counts of its own: one row for each candidate."""
    from rich.text import Text

    results = [(row.case, r) for row in rows for r in row.results.values() if has_time(r)]
    extras = list(dict.fromkeys(name for _, r in results for name in r.extra))
    common = common_settings(row.case for row in rows)
    table = new_table()
    for name in ("case", "model", "candidate", "served by"):
        table.add_column(name, overflow="fold")
    for name in ("us", "(p10-p90)", *(name.replace("_", " ") for name in extras)):
        table.add_column(name, justify="right")
    for case, result in results:
        table.add_row(
            case_cell(case, common),
            Text(case.model),
            Text(result.candidate),
            _server_cell(result) if result.candidate == OURS else "",
            us_text(result.us),
            _spread(result),
            *(f"{result.extra[name]:.4g}" if name in result.extra else "" for name in extras),
        )
    return table


def new_table(title: str = "") -> Table:
    """A table of one look, as narrow as it can be."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, title=title or None, title_justify="left")


def case_cell(case: Case, common: Mapping[str, Any]) -> Text:
    from rich.text import Text

    unusual = unusual_settings(case, common)
    return Text(f"{case_name(case)}, {unusual}" if unusual else case_name(case))


def _time_cell(result: Result | None, wide: bool) -> Text:
    from rich.text import Text

    if result is None:
        return Text("not run", style="dim")
    if not has_time(result):
        return Text(result.status, style="dim" if result.status == "unsupported" else "bold red")
    text = Text(us_text(result.us), style="bold")
    if wide:
        return text.append(f" {_spread(result)}", style="not bold dim")
    return text.append(" ").append_text(_server_cell(result))


def _server_cell(result: Result | None) -> Text:
    from rich.text import Text

    served_by = result.implementation if result is not None else ""
    return Text(served_by, style="yellow" if REFERENCE in served_by else "green")


def _spread(result: Result) -> str:
    return "" if result.p10 is None or result.p90 is None else f"({us_text(result.p10)}-{us_text(result.p90)})"


def _reference_note(rows: list[Row]) -> str:
    ours = [row.ours for row in rows if has_time(row.ours)]
    count = sum(REFERENCE in r.implementation for r in ours if r is not None)
    if not count:
        return ""
    where = f"in {count} of these {len(ours)} cases"
    return f"  Ours is the reference (plain PyTorch, no kernel of this library), or partly, {where}."


def _without_time(rows: Iterable[Row]) -> list[str]:
    """Why results have no time, each reason once: the wrong ones first."""
    reasons: dict[tuple[str, str, str], list[Result]] = {}
    for result in (r for row in rows for r in row.results.values() if not has_time(r)):
        why = " ".join(result.why.split()) or "no reason given"
        reasons.setdefault((result.candidate, result.status, why), []).append(result)
    order = {"wrong": 0, "error": 1, "unsupported": 2}
    lines = []
    for (name, status, why), found in sorted(reasons.items(), key=lambda item: (order.get(item[0][1], 3), item[0][0])):
        names = list(dict.fromkeys(case_name(r.case) for r in found))
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        cases = "1 case" if len(found) == 1 else f"{len(found)} cases"
        lines.append(f"{name}: {status} in {cases} ({where}): {why}{_deviation(found) if status == 'wrong' else ''}")
    return lines


def _deviation(results: list[Result]) -> str:
    known = [(r.error, r.allowed) for r in results if r.error is not None and r.allowed is not None]
    if not known:
        return ""
    error, allowed = max(known)
    return f" (off by up to {error:.2g}, allowed {allowed:.2g})"
