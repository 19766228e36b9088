"""Tables of measurements in a Markdown text, made from committed records.

    <!-- bench:steps bench/results/h200/sweep.jsonl -->
    ... replaced ...
    <!-- /bench:steps -->

A marker stands at the start of a line; the record's path is relative to the repository's root.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .case import Result
from .record import Record, RecordError
from .rows import (
    OURS,
    Row,
    candidates_of,
    case_name,
    common_settings,
    facts,
    has_time,
    over,
    ratio_text,
    rows_of,
    unusual_settings,
    us_text,
)

MARKER = re.compile(
    r"^<!--[ \t]*(?P<close>/?)bench:(?P<name>\S*)(?:[ \t]+(?P<record>\S+))?[ \t]*-->[ \t]*$", re.MULTILINE
)
ATTENTION_PEERS = ("flashinfer", "vllm", "sglang")
OP_PEERS = ("pytorch", "torch.compile")
OP_MODELS = ("E4B", "31B")  # the smallest weights with a centroid head, the largest with a dense one
OP_BATCHES = (1, 64)


class ReadmeError(ValueError):
    """A marker that cannot be served: an unknown table, no end, no record, a record without such results."""


def update(text: str, root: Path) -> str:
    """The text with every table made anew."""
    parts, end = [], 0
    for block in _blocks(text):
        parts += [text[end : block.start], block.table(root)]
        end = block.end
    return "".join([*parts, text[end:]])


def stale(text: str, root: Path) -> list[str]:
    """The tables, as `name record`, that differ from what their records say."""
    return [
        f"{block.name} {block.record}" for block in _blocks(text) if text[block.start : block.end] != block.table(root)
    ]


@dataclass(frozen=True)
class _Block:
    """The text from `start` to `end` stands between two markers."""

    name: str
    record: str
    line: int
    start: int
    end: int

    def table(self, root: Path) -> str:
        where = f"line {self.line}: bench:{self.name} {self.record}"
        try:
            record = Record.load(root / self.record)
        except RecordError as error:
            raise ReadmeError(f"{where}: {error}") from error
        lines = list(TABLES[self.name](record))
        if not lines:
            raise ReadmeError(f"{where}: the record has no results for this table")
        return "\n".join(["", *lines, ""])


def _blocks(text: str) -> Iterator[_Block]:
    opened: re.Match[str] | None = None
    for match in MARKER.finditer(text):
        line, name = text.count("\n", 0, match.start()) + 1, match["name"]
        if name not in TABLES:
            raise ReadmeError(f"line {line}: bench:{name}: unknown table; known: {', '.join(TABLES)}")
        if match["close"]:
            if opened is None or opened["name"] != name:
                raise ReadmeError(f"line {line}: /bench:{name}: no bench:{name} before it is open")
            first = text.count("\n", 0, opened.start()) + 1
            yield _Block(name, opened["record"], first, opened.end(), match.start())
            opened = None
            continue
        if opened is not None:
            raise _no_end(text, opened)
        if match["record"] is None:
            raise ReadmeError(f"line {line}: bench:{name}: expected the path of a record behind the name, got none")
        opened = match
    if opened is not None:
        raise _no_end(text, opened)


def _no_end(text: str, opened: re.Match[str]) -> ReadmeError:
    line, name = text.count("\n", 0, opened.start()) + 1, opened["name"]
    return ReadmeError(f"line {line}: bench:{name}: expected a line <!-- /bench:{name} --> behind it, got none")


def _steps(record: Record) -> Iterable[str]:
    return _per_candidate([row for row in rows_of(record) if row.case.level == "step"])


def _rounds(record: Record) -> Iterable[str]:
    return _per_candidate([row for row in rows_of(record) if row.case.level == "round"])


def _per_candidate(rows: list[Row]) -> Iterable[str]:
    """Every candidate's time, and how far the best peer is from the floor and from ours."""
    if not rows:
        return []
    peers = [name for name in candidates_of(rows) if name != OURS]
    labels = _Labels(rows)
    head = [*labels.names, "floor", "ours", "served by", "best peer", "best peer / ours", *peers]
    lines = []
    for row in rows:
        best = row.best_peer
        ratio = over(best.us if best else None, row.ours.us if row.ours else None)
        lines.append(
            [
                *labels.of(row),
                us_text(row.floor_us),
                _cell(row.ours),
                row.ours.implementation if row.ours else "",
                f"{best.candidate} {us_text(best.us)}" if best else "",
                ratio_text(ratio),
                *(_cell(row.results.get(name)) for name in peers),
            ]
        )
    return _markdown(head, lines, left=labels.left)


def _attention(record: Record) -> Iterable[str]:
    rows = [row for row in rows_of(record) if row.case.level == "op" and row.case.name == "draft_attention"]
    return _fixed_peers(rows, ATTENTION_PEERS, layer=True)


def _ops(record: Record) -> Iterable[str]:
    rows = [row for row in rows_of(record) if row.case.level == "op" and row.case.name != "draft_attention"]
    chosen = [row for row in rows if row.case.model in OP_MODELS and row.case.batch in OP_BATCHES]
    return _fixed_peers(chosen, OP_PEERS)


def _fixed_peers(rows: list[Row], peers: Sequence[str], layer: bool = False) -> Iterable[str]:
    if not rows:
        return []
    labels = _Labels(rows, layer=layer, op=not layer)
    head = [*labels.names, "floor", "ours", "served by", *peers]
    lines = [
        [
            *labels.of(row),
            us_text(row.floor_us),
            _cell(row.ours),
            row.ours.implementation if row.ours else "",
            *(_cell(row.results.get(name)) for name in peers),
        ]
        for row in rows
    ]
    return _markdown(head, lines, left=labels.left)


def _machine(record: Record) -> Iterable[str]:
    lines = [[name, f"`{text}`" if name == "command" else text] for name, text in facts(record.run)]
    return _markdown(["", ""], lines, left=2)


def _generate(record: Record) -> Iterable[str]:
    rows = [row for row in rows_of(record) if row.case.level == "generate"]
    results = [(row, r) for row in rows for r in row.results.values() if has_time(r)]
    if not results:
        return []
    extras = list(dict.fromkeys(name for _, r in results for name in r.extra))
    labels = _Labels(rows, op=True)
    head = [*labels.names, "candidate", "us a token", *(name.replace("_", " ") for name in extras)]
    lines = [
        [
            *labels.of(row),
            f"{r.candidate} ({r.implementation})" if r.implementation else r.candidate,
            us_text(r.us),
            *(f"{r.extra[name]:.4g}" if name in r.extra else "" for name in extras),
        ]
        for row, r in results
    ]
    return _markdown(head, lines, left=labels.left)


class _Labels:
    """The columns that say which case a row is: those that every table has, and those that vary in this one."""

    def __init__(self, rows: list[Row], *, layer: bool = False, op: bool = False) -> None:
        self.common = common_settings(row.case for row in rows)
        cases = [row.case for row in rows]
        named = not layer and (op or len({case_name(case) for case in cases}) > 1)
        contexts, rows_a_request = ({getattr(case, name) for case in cases} for name in ("context", "rows"))
        unusual = any(unusual_settings(case, self.common) for case in cases)
        columns: list[tuple[str, Callable[[Row], str], bool]] = [
            ("op" if cases[0].level == "op" else "case", lambda row: case_name(row.case), named),
            ("model", lambda row: row.case.model, True),
            ("layer", lambda row: row.case.variant, layer),
            ("batch", lambda row: str(row.case.batch), True),
            ("context", lambda row: str(row.case.context), not op or len(contexts) > 1),
            ("rows", lambda row: str(row.case.rows), layer or len(rows_a_request) > 1),
            ("settings", lambda row: unusual_settings(row.case, self.common), unusual),
        ]
        self.columns = [(name, text) for name, text, wanted in columns if wanted]
        self.names = [name for name, _ in self.columns]
        self.left = next((i for i, name in enumerate(self.names) if name == "batch"), len(self.names))

    def of(self, row: Row) -> list[str]:
        return [text(row) for _, text in self.columns]


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    return us_text(result.us) if has_time(result) else result.status


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]], left: int) -> Iterable[str]:
    """A Markdown table; the first `left` columns are texts, the others numbers."""
    yield _line(head)
    yield "|" + "|".join("---" if i < left else "---:" for i in range(len(head))) + "|"
    yield from map(_line, lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


TABLES: dict[str, Callable[[Record], Iterable[str]]] = {
    "steps": _steps,
    "rounds": _rounds,
    "attention": _attention,
    "ops": _ops,
    "machine": _machine,
    "generate": _generate,
}
