"""Runs compute-sanitizer's memcheck and initcheck over tests/gpu/test_small.py, and writes down what they found.

    python tests/gpu/sanitize.py --out bench/results/h200/sanitize.json [--jobs 8] [--timeout 240] [pytest arguments]

The tests run once without it first, which compiles the kernels; then in `--jobs` processes beside each other for each
tool. PyTorch's caching allocator is off: in a block of its own an access beyond a tensor is one within memory. Each
tool must also report a kernel that is broken on purpose. 1 for any error, and for a tool that could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOOLS = {"memcheck": "store_one_too_many", "initcheck": "copy_what_was_never_written"}  # broken, to be reported
# Errors of the API are left out: PyTorch asks for what a device may lack, and a launch that fails fails its test. The
# padding parts neighbours, so that an access beyond one is not one within the other.
FLAGS = [
    "--target-processes", "application-only", "--report-api-errors", "no", "--padding", "512", "--print-limit", "20",
]
ERROR_CODE = 99  # of a process in which the tool found something
MESSAGES = 60  # lines of a tool's report that are kept


@dataclass(frozen=True)
class Done:
    """One process: `errors` as the tool's summary counts them, None where it has printed none."""

    exit_code: int | None  # None: it ran past its time
    errors: int | None
    passed: int  # tests
    seconds: float
    messages: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=8, help="processes beside each other (default 8)")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each tool (default 240)")
    parser.add_argument("--sanitizer", default=find_sanitizer(), help="the program (default where CUDA has it)")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one; may be given again")
    args, chosen = parser.parse_known_args(arguments)
    command = shlex.join(["python", "tests/gpu/sanitize.py", *(arguments or sys.argv[1:])])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for record in sanitize(args.sanitizer, args.tool or list(TOOLS), args.jobs, args.timeout, chosen):
        text = json.dumps({"command": command, **record}, indent=1) + "\n"
        args.out.write_text(text, encoding="utf-8")  # a run that is cut short leaves what it saw, with ok null
    print(f"plain: {record['plain']['passed']} of {record['tests']} tests, {record['plain']['seconds']} s")
    for name, tool in record["tools"].items():
        print(f"{name}: {tool['errors']} errors in {tool['passed']} tests, {tool['seconds']} s, ok: {tool['ok']}, "
              f"reports the broken kernel: {tool['reports_a_broken_kernel']}")
    if not record["ok"]:
        print(text[-6000:])
    return 0 if record["ok"] else 1


def find_sanitizer() -> str:
    beside_nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or str(beside_nvcc)


def sanitize(
    sanitizer: str, tools: Sequence[str], jobs: int, timeout: float, chosen: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Everything that the record says but for the command, after each part of it."""
    names = collect(chosen)
    plain = together([[*pytest(), *part] for part in shares(names, jobs)], timeout)
    ok = bool(names) and plain["passed"] == len(names) and not any(d["exit_code"] for d in plain["processes"])
    record: dict[str, Any] = {
        "ok": None, **about(sanitizer), "tests": len(names), "plain": {"ok": ok, **plain}, "tools": {},
    }
    yield record
    for tool in tools:
        record["tools"][tool] = with_tool(sanitizer, tool, names, jobs, timeout)
        yield record
    record["ok"] = ok and all(one["ok"] for one in record["tools"].values())
    yield record


def with_tool(sanitizer: str, tool: str, names: Sequence[str], jobs: int, timeout: float) -> dict[str, Any]:
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(ERROR_CODE), *FLAGS]
    broken = run([*command, sys.executable, str(HERE / "broken_kernels.py"), TOOLS[tool]], timeout)
    reports = bool(broken.errors) and any(TOOLS[tool] in line for line in broken.messages)
    found = together([[*command, *pytest(), *part] for part in shares(names, jobs)], timeout)
    clean = found["errors"] == 0 and not any(d["exit_code"] != 0 for d in found["processes"])
    ok = clean and reports and found["passed"] == len(names)
    shown = shlex.join([Path(sanitizer).name, *command[1:], "python", "-m", "pytest", "tests/gpu/test_small.py"])
    return {"ok": ok, "command": shown, "reports_a_broken_kernel": reports, "broken_kernel": asdict(broken), **found}


def pytest() -> list[str]:
    return [sys.executable, "-m", "pytest", "-c", str(HERE.parents[1] / "pyproject.toml"), "-q", "-p",
            "no:cacheprovider"]


def collect(chosen: Sequence[str]) -> list[str]:
    """The tests, each by a name that pytest takes from the folder of tests."""
    command = [*pytest(), "--collect-only", str(HERE / "test_small.py"), *chosen]
    done = subprocess.run(command, cwd=HERE.parent, env=environment(), capture_output=True, text=True, timeout=300)
    names = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
    return [str(HERE / "test_small.py") + "::" + name.split("::", 1)[1] for name in names]


def shares(names: Sequence[str], jobs: int) -> list[Sequence[str]]:
    """Every test once; neighbours, which take alike long, go to different processes."""
    return [part for part in (names[i::jobs] for i in range(jobs)) if part]


def together(commands: Sequence[list[str]], timeout: float) -> dict[str, Any]:
    """All at the same time; errors and tests added up, None for errors where a process told none."""
    start = time.monotonic()
    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        done = list(pool.map(lambda command: run(command, timeout), commands))
    counted = [one.errors for one in done]
    return {
        "errors": None if None in counted else sum(n for n in counted if n),
        "passed": sum(one.passed for one in done),
        "seconds": round(time.monotonic() - start, 1),
        "processes": [asdict(one) for one in done],
    }


def run(command: Sequence[str], timeout: float) -> Done:
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command, cwd=HERE.parent, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )
    except OSError as error:
        return Done(127, None, 0, 0.0, [f"{command[0]}: {error}"])
    try:
        text, code = process.communicate(timeout=timeout)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own group, which start_new_session made
        text, code = process.communicate()[0], None
    return judge(text, code, time.monotonic() - start)


def judge(text: str, code: int | None, seconds: float) -> Done:
    """What the output of a process says."""
    summaries = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
    passed = re.search(r"(\d+) passed", text)
    lines = text.splitlines()
    reported = [line for line in lines if line.startswith("=========") and "COMPUTE-SANITIZER" not in line]
    errors = sum(summaries) if summaries else None
    kept = reported[:MESSAGES] if errors else lines[-MESSAGES:] if code != 0 else []
    return Done(code, errors, int(passed[1]) if passed else 0, round(seconds, 1), kept)


def environment() -> Mapping[str, str]:
    """PYTHONPATH in absolute form: tests run in their own folder, where this folder's mtp_kernels shadows nothing."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    absolute = os.pathsep.join(map(os.path.abspath, paths))
    return {**os.environ, "PYTHONPATH": absolute, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def about(sanitizer: str) -> dict[str, Any]:
    import torch

    version = ""
    if shutil.which(sanitizer):
        told = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, timeout=60).stdout
        version = next((line.strip() for line in told.splitlines() if "ersion" in line), "")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": torch.__version__, "sanitizer": version}


if __name__ == "__main__":
    sys.exit(main())
