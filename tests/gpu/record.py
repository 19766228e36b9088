"""Runs the tests on this machine and writes what passed, where, and at which commit, as JSON.

    python tests/gpu/record.py --commit $(git rev-parse HEAD) --out bench/results/h200/tests.json [pytest arguments]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mtp_kernels

MOST_LINES, MOST_CHARACTERS = 15, 1500  # of what is kept of a failure: its end says what was wrong


class Counter:
    """Counts outcomes by test file, and keeps the names of failures, with the end of what pytest says of each.

    The record is written after every failure and every hundred outcomes, and at the end: a run that is cut short leaves
    what it saw, with null for its exit code.
    """

    def __init__(self, about: dict[str, Any], out: Path) -> None:
        self.about, self.out = about, out
        self.outcomes: dict[str, dict[str, int]] = {}
        self.failed: dict[str, str] = {}  # by the name of the test
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            of_file = self.outcomes.setdefault(report.location[0], {})
            of_file[report.outcome] = of_file.get(report.outcome, 0) + 1
            self.count += 1
            if report.failed:
                self.failed[report.nodeid] = last_lines(report.longreprtext)
            if report.failed or self.count % 100 == 0:
                self.write(None)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(int(exitstatus))  # before the summary, which may take long

    def write(self, exit_code: int | None) -> None:
        record = {**self.about, "exit_code": exit_code, "failed": self.failed, "outcomes": self.outcomes}
        self.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-MOST_LINES:])[-MOST_CHARACTERS:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args, rest = parser.parse_known_args()
    about = {
        "commit": args.commit,
        "command": " ".join(["python", "tests/gpu/record.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "served_by": {f"{r.op} on {r.device}": r.serves for r in mtp_kernels.report().rows},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    counter = Counter(about, args.out)
    code = int(pytest.main(["-q", *rest], plugins=[counter]))
    counter.write(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
