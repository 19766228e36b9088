"""What `mtp-kernels bench` does: measures and shows, or compares, shows and writes out records."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..demo.pair import DemoError
from . import machine, sweeps
from .arguments import DEFAULTS
from .case import Case
from .compare import compare, exit_code
from .compare import show as show_changes
from .display import Progress, progress, show_record
from .gpus import GPUS, gpu_of
from .peers import find_peers
from .predict import PredictionError, predict
from .predict import show as show_prediction
from .readme import ReadmeError, stale, update
from .record import Record, RecordError, Run, write_lines
from .runner import BrokenDevice, run_case
from .setting import Setting

if TYPE_CHECKING:
    from rich.console import Console

AXES = {"models": "model", "batch": "batch", "context": "context", "rows": "rows", "dtype": "dtype",
        "kv_dtype": "kv_dtype", "page_size": "page_size", "layout": "layout", "mode": "mode"}
PIPED_WIDTH = 120  # columns of the tables where there is no terminal to ask


class BenchError(RuntimeError):
    """An argument is wrong, or something that the benchmark needs is not here; the message says what to do."""


def run(args: argparse.Namespace) -> int:
    """0; 1 where a comparison found something slower or a table is stale."""
    try:
        if args.action == "compare":
            return _compare(args)
        if args.action == "readme":
            return _readme(args)
        if args.action == "policy":
            return _policy(args)
        if args.action == "show":
            return _show(Record.load(args.record), args.show_plot, args.show_predict)
        return _measure(args)
    except (RecordError, ReadmeError, PredictionError, BrokenDevice) as error:
        raise BenchError(str(error)) from error


def _measure(args: argparse.Namespace) -> int:
    """Everything that can be wrong with the arguments is found before the first measurement."""
    device = _device(args.device)
    cases = _cases(args, device.type)
    _check_output(args, device)
    if args.threads:
        torch.set_num_threads(args.threads)
    setting = _setting(args, device)
    with ExitStack() as stack:
        targets = [sys.stdout] if args.json else []
        if args.out:
            targets.append(stack.enter_context(_open(args.out)))
        record = Record(_describe(device, setting, args.words))
        for target in targets:
            write_lines(target, [record.run.as_json()])
        shown = stack.enter_context(_progress(args.json, len(cases)))
        for case in cases:
            shown.advance(f"{case.name} {case.variant} {case.model} batch {case.batch}")
            results = run_case(case, setting, record.run.copy_bandwidth)
            record.results += results
            for target in targets:
                write_lines(target, [r.as_json() for r in results])
    return _show(record, args.plot, args.predict, tables=not args.json)


def _cases(args: argparse.Namespace, device: str) -> list[Case]:
    if args.quick or args.sweep:
        what = "--quick" if args.quick else "--sweep"
        for name, default in DEFAULTS.items():
            if name != "dtype" and getattr(args, name) != default:
                raise BenchError(f"{what}: has cases of its own: expected no --{name.replace('_', '-')} beside it")
        if len(args.dtype) > 1:
            raise BenchError(f"--dtype: expected one beside {what}, got {','.join(args.dtype)}")
        return (sweeps.quick if args.quick else sweeps.standard)(device, args.dtype[0])
    values = {field: getattr(args, name) for name, field in AXES.items()}
    values |= {"warm": (args.warm,), "num_steps": (args.steps,)}
    cases = []
    for one in args.dtype:  # caches in the dtype of the rest, unless theirs was given
        own = {"dtype": (one,), "kv_dtype": args.kv_dtype or (one,)}
        if other := set(own["kv_dtype"]) - {one, "fp8"}:
            raise BenchError(f"--kv-dtype: expected fp8 or the dtype, {one}, got {', '.join(sorted(other))}")
        cases += sweeps.product(args.level, args.ops, {**values, **own}, device)
    if not cases:
        raise BenchError(f"--ops: expected an op of {', '.join(args.models)}, got {', '.join(args.ops)}")
    return list(dict.fromkeys(cases))


def _check_output(args: argparse.Namespace, device: torch.device) -> None:
    if not args.json:
        _require("rich", "the tables (or pass --json)")
    if args.plot:
        _require("matplotlib", "--plot")
        try:
            args.plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"--plot: {error}") from error
    if args.predict:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        if args.json:
            raise BenchError("--predict: prints tables: expected no --json beside it")
        if gpu_of(name) is None:
            raise BenchError(f"--predict: expected a run on one of {', '.join(GPUS)}, got one on {name}")


def _setting(args: argparse.Namespace, device: torch.device) -> Setting:
    try:
        peers = find_peers(args.peer_wheel)
    except ValueError as error:
        raise BenchError(str(error)) from error
    compiles = not args.no_compile and not args.no_peers and device.type == "cuda"
    cache = machine.cache_bytes(device)
    return Setting(device, cache, peers, compiles, compiles, args.samples, args.seconds, args.no_peers)


def _describe(device: torch.device, setting: Setting, words: Sequence[str]) -> Run:
    copy, read = machine.bandwidths(device)
    name, about = machine.describe(device)  # its clocks behind some work, not of a device that rests
    return Run(
        command=shlex.join(["mtp-kernels", *words]),
        commit=machine.commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        device=device.type,
        device_name=name,
        machine=about,
        copy_bandwidth=copy,
        read_bandwidth=read,
        flops_per_second=machine.flops_per_second(device),
        node_us=machine.node_us(device),
        peers=setting.peers.status,
    )


def _show(record: Record, plots: Path | None, predictions: Sequence[str], tables: bool = True) -> int:
    if tables:
        console = _console("the tables")
        show_record(console, record)
        for target in predictions:
            show_prediction(console, predict(record, target))
    if plots:
        _require("matplotlib", "--plot")
        from .plots import draw

        try:
            drawn = draw(record, plots)
        except OSError as error:
            raise BenchError(f"--plot: {error}") from error
        print("drawn: " + ", ".join(str(p) for p in drawn), file=sys.stderr)
    return 0


def _compare(args: argparse.Namespace) -> int:
    a, b = Record.load(args.a), Record.load(args.b)
    changes = compare(a, b, floor=args.tolerance)
    show_changes(_console("the comparison"), changes, (a.run, b.run))
    return exit_code(changes)


def _readme(args: argparse.Namespace) -> int:
    try:
        text, root = args.file.read_text(encoding="utf-8"), args.file.resolve().parent
        if not args.check:
            args.file.write_text(update(text, root), encoding="utf-8")
            return 0
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{args.file}: {error}") from error
    names = stale(text, root)
    for name in names:
        print(f"{args.file}: the table {name} is not what its record gives: mtp-kernels bench readme {args.file}")
    return 1 if names else 0


def _policy(args: argparse.Namespace) -> int:
    from .policy_command import policy_command

    try:
        return policy_command(args, None if args.policy_json else _console("the tables (or pass --json)"))
    except (DemoError, OSError) as error:
        raise BenchError(str(error)) from error


def _progress(quiet: bool, total: int) -> AbstractContextManager[Any]:
    if quiet:
        return nullcontext(Progress(lambda description: None))
    return progress(_console("the tables", stderr=True), total)


def _console(what: str, stderr: bool = False) -> Console:
    _require("rich", what)
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPED_WIDTH)


def _device(name: str | None) -> torch.device:
    have = torch.cuda.is_available()
    if name == "cuda" and not have:
        raise BenchError(f"--device: cuda: torch {torch.__version__} finds no CUDA device here")
    return torch.device(name or ("cuda" if have else "cpu"))


def _open(path: Path) -> Any:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--out: {error}") from error


def _require(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise BenchError(f"{what}: needs {package}: pip install 'mtp-kernels[bench]'")
