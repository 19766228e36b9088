"""The command line of `mtp-kernels bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..ops import OPS
from . import machine, sweeps
from .case import DTYPES, LEVELS, MODELS, Case
from .display import Progress, progress
from .peers import find_peers
from .record import Record, RecordError, Run, write_lines
from .runner import BrokenDevice, run_case
from .setting import Setting

LAYOUTS, MODES = ("NHD", "HND"), ("graph", "eager")
AXES = {"models": "model", "batch": "batch", "context": "context", "rows": "rows", "dtype": "dtype",
        "kv_dtype": "kv_dtype", "page_size": "page_size", "layout": "layout", "mode": "mode"}


class BenchError(RuntimeError):
    """An argument is wrong, or something that the benchmark needs is not here; the message says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="every op and level once, about a minute")
    what.add_argument("--sweep", action="store_true", help="the standard table: every op, all five sizes")
    parser.add_argument("--level", type=_names("--level", LEVELS), default=("op", "step"), metavar="L,...",
                        help=f"levels to measure, of {', '.join(LEVELS)} (default op,step)")
    parser.add_argument("--ops", type=_names("--ops", tuple(OPS)), default=tuple(OPS), metavar="OP,...",
                        help="ops to measure (default all)")
    parser.add_argument("--models", type=_names("--models", MODELS), default=("E4B",), metavar="M,...",
                        help=f"sizes, of {', '.join(MODELS)} (default E4B)")
    for name, default, about in (("batch", "1", "requests"), ("context", "1024", "committed keys of a request"),
                                 ("rows", "1", "queries of a request; of a round, topk"),
                                 ("page-size", "16", "slots of a page")):
        parser.add_argument(f"--{name}", type=_numbers(f"--{name}"), default=(int(default),), metavar="N,...",
                            help=f"{about} (default {default})")
    for name, known, default in (("dtype", tuple(n for n in DTYPES if n != "fp8"), "bf16"),
                                 ("kv-dtype", tuple(DTYPES), None), ("layout", LAYOUTS, "NHD"),
                                 ("mode", MODES, "graph")):
        parser.add_argument(f"--{name}", type=_names(f"--{name}", known), default=default and (default,),
                            metavar="X,...", help=f"of {', '.join(known)} (default {default or 'the dtype'})")
    parser.add_argument("--warm", action="store_true", help="the same inputs in every call, as when a cache holds them")
    parser.add_argument("--steps", type=int, default=4, help="draft steps of a round (default 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--threads", type=int, help="threads of the CPU (default: torch's)")
    parser.add_argument("--samples", type=int, default=30, help="samples of each time (default 30)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time to sample a case, from three samples on")
    parser.add_argument("--peer-wheel", type=Path, action="append", default=[], metavar="PATH",
                        help="a wheel of vllm or sglang, or a folder with one unpacked; may be repeated")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the record there, as PNG and SVG")
    parser.add_argument("--predict", action="append", default=[], metavar="GPU",
                        help="what the bytes model makes of another GPU (h100, b200, ...); may be repeated")
    parser.add_argument("--json", action="store_true", help="print the record as JSON lines and nothing else")
    _add_actions(parser)


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="{compare,show,readme}")
    compare = actions.add_parser("compare", help="what changed from record A to record B, beyond noise; 1 if slower")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--tolerance", type=float, default=0.05, help="relative change that is no change (0.05)")
    show = actions.add_parser("show", help="a record again: its tables, plots and predictions")
    show.add_argument("record", type=Path)
    show.add_argument("--plot", type=Path, metavar="FOLDER", dest="show_plot")
    show.add_argument("--predict", action="append", default=[], metavar="GPU", dest="show_predict")
    readme = actions.add_parser("readme", help="make the tables of a README from the records that it names")
    readme.add_argument("file", type=Path)
    readme.add_argument("--check", action="store_true", help="change nothing; 1 where a table is stale")


def run(args: argparse.Namespace) -> int:
    """0; 1 where a comparison found something slower or a table is stale."""
    try:
        if args.action == "compare":
            return _compare(args)
        if args.action == "readme":
            return _readme(args)
        if args.action == "show":
            return _show(Record.load(args.record), args.show_plot, args.show_predict)
        return _measure(args)
    except (RecordError, BrokenDevice, ValueError) as error:
        raise BenchError(str(error)) from error


def _measure(args: argparse.Namespace) -> int:
    if args.plot:
        _require("matplotlib", "--plot")
    if not args.json:
        _require("rich", "the tables (or pass --json)")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = _device(args.device)
    setting = _setting(args, device)
    cases = _cases(args, device.type)
    record = Record(_describe(device, setting))
    if args.json:
        write_lines(sys.stdout, [record.run.as_json()])
    file = _open(args.out)
    if file:
        write_lines(file, [record.run.as_json()])
    with _progress(args.json, len(cases)) as shown:
        for case in cases:
            shown.advance(f"{case.name} {case.variant} {case.model} batch {case.batch}")
            results = run_case(case, setting, record.run.copy_bandwidth)
            record.results += results
            for target in filter(None, (file, sys.stdout if args.json else None)):
                write_lines(target, [r.as_json() for r in results])
    if file:
        file.close()
    return 0 if args.json and not args.plot else _show(record, args.plot, args.predict, tables=not args.json)


def _setting(args: argparse.Namespace, device: torch.device) -> Setting:
    compiles = not args.no_compile and device.type == "cuda"
    return Setting(
        device, machine.cache_bytes(device), find_peers(args.peer_wheel), compiles, compiles, args.samples, args.seconds
    )


def _cases(args: argparse.Namespace, device: str) -> list[Case]:
    dtype = args.dtype[0]
    if args.quick or args.sweep:
        return (sweeps.quick if args.quick else sweeps.standard)(device, dtype)
    values = {field: getattr(args, name) for name, field in AXES.items()}
    fixed = {"warm": (args.warm,), "num_steps": (args.steps,)}
    if values["kv_dtype"] is not None:
        return sweeps.product(args.level, args.ops, {**values, **fixed}, device)
    cases = []
    for one in values["dtype"]:  # caches in the dtype of the rest
        cases += sweeps.product(args.level, args.ops, {**values, **fixed, "dtype": (one,), "kv_dtype": (one,)}, device)
    return cases


def _describe(device: torch.device, setting: Setting) -> Run:
    name, about = machine.describe(device)
    copy, read = machine.bandwidths(device)
    return Run(
        command=shlex.join(["mtp-kernels", *sys.argv[1:]]),
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
        _require("rich", "the tables")
        from rich.console import Console

        from .display import show_record
        from .predict import predict
        from .predict import show as show_prediction

        console = Console()
        show_record(console, record)
        for target in predictions:
            show_prediction(console, predict(record, target))
    if plots:
        _require("matplotlib", "--plot")
        from .plots import draw

        drawn = draw(record, plots)
        print("drawn: " + ", ".join(str(p) for p in drawn), file=sys.stderr)
    return 0


def _compare(args: argparse.Namespace) -> int:
    _require("rich", "the comparison")
    from rich.console import Console

    from .compare import compare, exit_code, show

    a, b = Record.load(args.a), Record.load(args.b)
    changes = compare(a, b, floor=args.tolerance)
    show(Console(), changes, (a.run, b.run))
    return exit_code(changes)


def _readme(args: argparse.Namespace) -> int:
    from .readme import stale, update

    text, root = args.file.read_text(encoding="utf-8"), args.file.resolve().parent
    if args.check:
        names = stale(text, root)
        for name in names:
            print(f"{args.file}: the table {name} is not what its record gives: mtp-kernels bench readme {args.file}")
        return 1 if names else 0
    args.file.write_text(update(text, root), encoding="utf-8")
    return 0


def _progress(quiet: bool, total: int) -> AbstractContextManager[Any]:
    if quiet:
        return nullcontext(Progress(lambda description: None))
    from rich.console import Console

    return progress(Console(stderr=True), total)


def _device(name: str | None) -> torch.device:
    have = torch.cuda.is_available()
    if name == "cuda" and not have:
        raise BenchError(f"--device: cuda: torch {torch.__version__} finds no CUDA device here")
    return torch.device(name or ("cuda" if have else "cpu"))


def _open(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--out: {error}") from error


def _require(package: str, what: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise BenchError(f"{what}: needs {package}: pip install 'mtp-kernels[bench]'")


def _names(option: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected names of {', '.join(known)}, got {name!r}")
        return names

    return parse


def _numbers(option: str) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"expected numbers of at least 1, separated by commas, got {text!r}")
        return numbers

    return parse


