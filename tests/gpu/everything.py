"""Times and tests everything that only a GPU shows, stage by stage, and writes the records into a folder.

    python tests/gpu/everything.py --commit $(git rev-parse HEAD) --out FOLDER [--seconds 1500] [--stage NAME ...]
        [--peer-wheel PATH ...]

Stages have limits of their own, and `--seconds` for all: what does not fit any more is left out and said so. Tests come
first, then compute-sanitizer, then times, beside the peers that are installed or given. Records are written as stages
go on, so that a run that is cut short leaves what it saw. 1 where a stage failed or was left out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BENCH = ("-m", "mtp_kernels.cli", "bench")
ALONE = (*BENCH, "--no-peers", "--no-compile", "--samples", "20", "--seconds", "0.4", "--out", "{out}")
BESIDE = (*BENCH, "--samples", "12", "--seconds", "0.25", "{peers}", "--out", "{out}")
ALL = "E4B,31B,26B-A4B,E2B,12B"
STEPS = (*BESIDE, "--level", "step", "--models", ALL)
ATTENTION = (*BESIDE, "--level", "op", "--ops", "draft_attention", "--models", ALL, "--no-compile")
HEADS = (*ALONE, "--level", "op", "--ops", "lm_head_topk", "--models", "31B", "--batch", "1,8,32")
TOPK = (
    *ALONE, "--level", "op", "--ops", "draft_attention", "--models", ALL, "--context", "8192,65536", "--rows", "1,4",
)
IGNORED = tuple(  # of the source tree, of a CPU's library, or of Triton's interpreter, which takes minutes
    f"tests/test_{name}.py"
    for name in (
        "lint", "build", "readme", "host", "native", "cpu_step", "doctests", "demo", "policy", "simulate",
        "triton_interpret", "triton_interpret_attention", "triton_interpret_heads", "attend_emulated",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A Python command, `{out}`, `{commit}` and `{peers}` filled in, and the seconds that it may take."""

    name: str
    seconds: float
    arguments: tuple[str, ...]

    def filled(self, out: Path, commit: str, peers: Sequence[str] = ()) -> list[str]:
        """The arguments, a record in the folder `out` among them."""
        suffix = ".jsonl" if "bench" in self.arguments else ".json"
        arguments = [part for a in self.arguments for part in (peers if a == "{peers}" else [a])]
        return [a.format(out=out.resolve() / (self.name + suffix), commit=commit) for a in arguments]


STAGES = (
    Stage("tests", 320, (
        "tests/gpu/record.py", "--commit", "{commit}", "--out", "{out}", "-n", "14",
        *(part for path in IGNORED for part in ("--ignore", path)), "tests",
    )),
    Stage("sanitize", 240, ("tests/gpu/sanitize.py", "--out", "{out}", "--jobs", "6", "--timeout", "110")),
    Stage("heads", 30, HEADS),
    Stage("topk", 90, TOPK),
    Stage("steps_b64", 200, (*STEPS, "--batch", "64", "--context", "4096")),
    Stage("steps_b8", 120, (*STEPS, "--batch", "8", "--context", "8192")),
    Stage("steps_b1", 260, (*STEPS, "--context", "1024,8192,65536")),
    Stage("attention", 150, (*ATTENTION, "--batch", "1,8", "--context", "1024,8192,65536")),
    Stage("attention_b64", 60, (*ATTENTION, "--batch", "64", "--context", "4096")),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--seconds", type=float, default=1500, help="for all stages together (default 1500)")
    parser.add_argument("--stage", action="append", choices=[s.name for s in stages], help="only this; may be repeated")
    parser.add_argument("--peer-wheel", action="append", default=[], help="of an engine, for the benchmarks")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    peers = [part for wheel in args.peer_wheel for part in ("--peer-wheel", wheel)]
    said = []
    for stage in stages:
        if args.stage is None or stage.name in args.stage:
            said.append((stage.name, *run(stage, args.out, args.commit, end - time.monotonic(), peers)))
    print(f"\n{'stage':<12}{'seconds':>8}  came of it")
    for name, seconds, what in said:
        print(f"{name:<12}{seconds:>8.0f}  {what}")
    return 0 if all(what == "ok" for *_, what in said) else 1


def run(stage: Stage, out: Path, commit: str, left: float, peers: Sequence[str] = ()) -> tuple[float, str]:
    """Seconds, and "ok" or what went wrong; what the command printed goes to `<stage>.log`."""
    limit = min(stage.seconds, left)
    if limit < stage.seconds / 4:
        return 0.0, f"left out: {max(0.0, left):.0f} s are left"
    start = time.monotonic()
    with (out / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *stage.filled(out, commit, peers)], cwd=ROOT, env={**os.environ, "MTP_COMMIT": commit},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
            return time.monotonic() - start, f"cut short after {limit:.0f} s"
    return time.monotonic() - start, "ok" if code == 0 else f"exit code {code}: see {stage.name}.log"


if __name__ == "__main__":
    sys.exit(main())
