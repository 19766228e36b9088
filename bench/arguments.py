"""The arguments of `mtp-kernels bench`. Each is checked as it is parsed; the messages name what is wanted."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..ops import OPS
from .case import DTYPES, LEVELS, MODELS
from .gpus import GPUS
from .simulate import REGIMES

LAYOUTS, MODES = ("NHD", "HND"), ("graph", "eager")
# What spans the cases, by the name of the argument. --quick and --sweep have values of their own for all but dtype.
DEFAULTS: dict[str, Any] = {
    "level": ("op", "step"), "ops": tuple(OPS), "models": ("E4B",), "batch": (1,), "context": (1024,), "rows": (1,),
    "page_size": (16,), "dtype": ("bf16",), "kv_dtype": None, "layout": ("NHD",), "mode": ("graph",), "warm": False,
    "steps": 4,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="every op and level once, about a minute")
    what.add_argument("--sweep", action="store_true", help="the standard table: every op, all five sizes")
    _add_cases(parser)
    parser.add_argument("--device", type=_one_of(("cpu", "cuda")), help="cpu or cuda (default cuda where there is one)")
    parser.add_argument("--threads", type=_count, metavar="N", help="threads of the CPU (default: torch's)")
    parser.add_argument("--samples", type=_count, default=30, metavar="N", help="samples of each time (default 30)")
    parser.add_argument("--seconds", type=_seconds, default=1.0, metavar="S",
                        help="time to sample a case, from three samples on (default 1)")
    parser.add_argument("--peer-wheel", type=Path, action="append", default=[], metavar="PATH",
                        help="a wheel of vllm or sglang, or a folder with one unpacked; may be repeated")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-peers", action="store_true", help="time this library alone")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON lines")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the record there, as PNG and SVG")
    parser.add_argument("--predict", type=_one_of(tuple(GPUS)), action="append", default=[], metavar="GPU",
                        help="what the bytes model makes of another GPU (h100, b200, ...); may be repeated")
    parser.add_argument("--json", action="store_true", help="print the record as JSON lines and nothing else")
    _add_actions(parser)


def _add_cases(parser: argparse.ArgumentParser) -> None:
    for name, known, about in (
        ("level", LEVELS, "levels to measure"), ("ops", tuple(OPS), "ops to measure"), ("models", MODELS, "sizes"),
        ("dtype", tuple(n for n in DTYPES if n != "fp8"), "of weights and activations"),
        ("kv-dtype", tuple(DTYPES), "of the cache"), ("layout", LAYOUTS, "of the cache"),
        ("mode", MODES, "replays of a CUDA graph or calls"),
    ):  # fmt: skip
        default = DEFAULTS[name.replace("-", "_")]
        text = "the dtype" if default is None else "all" if default == known else ",".join(default)
        choices = "" if name == "ops" else f", of {', '.join(known)}"
        parser.add_argument(f"--{name}", type=_names(known), default=default, metavar="X,...",
                            help=f"{about}{choices} (default {text})")
    for name, about in (("batch", "requests"), ("context", "committed keys of a request"),
                        ("rows", "queries of a request; of a round, topk"), ("page-size", "slots of a page")):
        default = DEFAULTS[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=_counts, default=default, metavar="N,...",
                            help=f"{about} (default {default[0]})")
    parser.add_argument("--warm", action="store_true", help="the same inputs in every call, as when a cache holds them")
    parser.add_argument("--steps", type=_count, default=DEFAULTS["steps"], metavar="N",
                        help="draft steps of a round (default 4)")


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="{compare,show,readme,policy}")
    compare = actions.add_parser("compare", help="what changed from record A to record B, beyond noise; 1 if slower")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--tolerance", type=_share, default=0.05, help="relative change that is no change (0.05)")
    show = actions.add_parser("show", help="a record again: its tables, plots and predictions")
    show.add_argument("record", type=Path)
    show.add_argument("--plot", type=Path, metavar="FOLDER", dest="show_plot")
    show.add_argument("--predict", type=_one_of(tuple(GPUS)), action="append", default=[], metavar="GPU",
                      dest="show_predict")
    readme = actions.add_parser("readme", help="make the tables of a README from the records that it names")
    readme.add_argument("file", type=Path)
    readme.add_argument("--check", action="store_true", help="change nothing; 1 where a table is stale")
    policy = actions.add_parser("policy", help="DraftPolicy beside every fixed depth, simulated; 1 if it falls behind")
    policy.add_argument("--batches", type=_counts, default=(1, 2, 4, 8, 16, 32, 64, 128), metavar="N,...",
                        help="requests in a round (default the powers of two to 128)")
    policy.add_argument("--acceptance", type=_names(REGIMES), default=REGIMES, metavar="X,...",
                        help=f"what kinds of it, of {', '.join(REGIMES)} (default all)")
    policy.add_argument("--tokens", type=_count, default=2000, metavar="N", help="a request in each run (default 2000)")
    policy.add_argument("--seed", type=_count, default=1, metavar="N", help="of queues and noise (default 1)")
    policy.add_argument("--out", type=Path, dest="policy_out", help="write the results there, as JSON")
    policy.add_argument("--json", action="store_true", dest="policy_json", help="print them as JSON and nothing else")


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected names of {', '.join(known)}, got {name!r}")
        return tuple(text.split(","))

    return parse


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {text!r}")
        return text

    return parse


def _counts(text: str) -> tuple[int, ...]:
    numbers = [_integer(part) for part in text.split(",")]
    if any(number is None or number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, separated by commas, got {text!r}")
    return tuple(number for number in numbers if number is not None)


def _count(text: str) -> int:
    number = _integer(text)
    if number is None or number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return number


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _seconds(text: str) -> float:
    return _float(text, "a number of seconds")


def _share(text: str) -> float:
    return _float(text, "a finite number >= 0")


def _float(text: str, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
    return number
