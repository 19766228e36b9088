"""The record of a run: JSON lines, the first says where and how it was measured, each other is one result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .case import Result

SCHEMA = 1


class RecordError(ValueError):
    """A file that is no record, or one of another version."""


@dataclass(frozen=True)
class PeerStatus:
    """A peer that was looked for."""

    name: str
    version: str = ""
    why_absent: str = ""  # "" where it can be used


@dataclass(frozen=True)
class Run:
    """Where, when and with what a record was measured."""

    command: str
    commit: str
    date: str  # ISO 8601, UTC
    device: str  # "cpu" or "cuda"
    device_name: str
    machine: dict[str, Any]  # driver, clocks, caches, versions
    copy_bandwidth: float  # bytes/s, read plus written
    read_bandwidth: float  # bytes/s
    flops_per_second: float  # of a large matrix product in bf16 (fp32 on a CPU)
    node_us: float | None = None  # one dependent small kernel in a CUDA graph
    peers: tuple[PeerStatus, ...] = ()
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        return {"kind": "run", **asdict(self)}


@dataclass
class Record:
    """A run and its results."""

    run: Run
    results: list[Result] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record; RecordError names the file and the line that is none."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}: {error}") from error
        rows = [(number, _parse(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
        if not rows or rows[0][1].get("kind") != "run":
            raise RecordError(f"{path}: expected a record of `mtp-kernels bench`, whose first line has kind run")
        head = {k: v for k, v in rows[0][1].items() if k != "kind"}
        if head.get("schema") != SCHEMA:
            raise RecordError(f"{path}: expected schema {SCHEMA}, got {head.get('schema')}")
        try:
            peers = tuple(PeerStatus(**p) for p in head.pop("peers"))
            run = Run(**head, peers=peers)
        except (KeyError, TypeError) as error:
            raise RecordError(f"{path}: line 1: {error}") from error
        return cls(run, [_result(path, number, row) for number, row in rows[1:]])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            write_lines(file, [self.run.as_json(), *(r.as_json() for r in self.results)])


def write_lines(file: TextIO, rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        file.write(json.dumps(row) + "\n")
    file.flush()


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{path}: line {number}: {error}") from error
    if not isinstance(row, dict):
        raise RecordError(f"{path}: line {number}: expected an object, got {type(row).__name__}")
    return row


def _result(path: Path, number: int, row: dict[str, Any]) -> Result:
    try:
        return Result.from_json(row)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path}: line {number}: {error}") from error
