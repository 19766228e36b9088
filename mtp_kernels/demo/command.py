"""The demo's command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..draft import num_candidates
from ..generation import GenerationChunk, GenerationOutput, GenerationStatistics, generate
from .pair import HEADS, DemoError, Pair, load_pair, pair_directory

PROMPT_TOKENS = 200
MOST_PROMPT_TOKENS = 1024  # of a prompt file: the target's masks are dense, so a whole book would not end
PROMPT_HELP = f"UTF-8 text to continue, its last {MOST_PROMPT_TOKENS} tokens (default: a held-out module)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair", type=Path, help="folder of the pair (default: the one that ships with the package)")
    parser.add_argument("--head", choices=HEADS, default="centroid", help="which of the pair's assistants drafts")
    parser.add_argument("--prompt-file", type=Path, help=PROMPT_HELP)
    parser.add_argument("--steps", type=int, default=4, help="draft steps a round (default 4)")
    parser.add_argument("--topk", type=int, default=1, help="branches a step; 1 is a chain (default 1)")
    parser.add_argument("--nodes", type=int, help="nodes of the tree with its root (default 16, or all there are)")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="tokens to generate (default 160)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--no-check", action="store_true", help="do not decode a second time without drafting")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when its output equals plain greedy decoding (or was not compared), 1 when it does not."""
    pair, prompt = _load(args)
    out = _generate(pair, prompt, args) if args.json else _show(pair, prompt, args)
    ids, statistics = out.token_ids[0], out.statistics
    check = {} if args.no_check else _check_against_greedy(pair, prompt, ids, args.max_new_tokens)
    if args.json:
        print(json.dumps(_as_json(pair, statistics, ids, check, args)))
    else:
        _show_summary(statistics, check)
    return 0 if check.get("equals_greedy", True) else 1


def _load(args: argparse.Namespace) -> tuple[Pair, Tensor]:
    for name, low in (("steps", 1), ("topk", 1), ("max_new_tokens", 1)):
        if getattr(args, name) < low:
            raise DemoError(f"--{name.replace('_', '-')}: expected at least {low}, got {getattr(args, name)}")
    most = num_candidates(args.steps, args.topk) + 1
    if args.nodes is not None and not 2 <= args.nodes <= most:
        raise DemoError(f"--nodes: expected 2 to {most} (root and candidates), got {args.nodes}")
    _check_device(args.device)
    if not args.json:
        _require_rich()
    text = None if args.prompt_file is None else _read(args.prompt_file)
    pair = load_pair(args.pair or pair_directory(), args.head, args.device)
    candidates = pair.weights.num_candidates
    if args.topk > candidates:
        raise DemoError(f"--topk: expected at most {candidates} (the head's candidates), got {args.topk}")
    if text is None:
        return pair, pair.held_out_prompt(pair.held_out[0], PROMPT_TOKENS)
    ids = pair.encode(text)[-MOST_PROMPT_TOKENS:]
    if not ids:
        raise DemoError(f"--prompt-file: {args.prompt_file} is empty")
    return pair, torch.tensor(ids, device=args.device)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"--prompt-file: {path}: {error}") from error


def _check_device(name: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise DemoError(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    have = torch.cuda.device_count()
    if name != "cpu" and (torch.device(name).index or 0) >= have:
        raise DemoError(f"--device: {name}: torch {torch.__version__} finds {have} CUDA devices here")


def _require_rich() -> None:
    if importlib.util.find_spec("rich") is None:
        raise DemoError("the display needs rich: pip install rich, or pass --json")


def _nodes(args: argparse.Namespace) -> int | None:
    if args.nodes is None and args.topk > 1:
        return min(16, num_candidates(args.steps, args.topk) + 1)
    return args.nodes


def _generate(
    pair: Pair, prompt: Tensor, args: argparse.Namespace, callback: Callable[[GenerationChunk], None] | None = None
) -> GenerationOutput:
    return generate(
        pair.model, pair.weights, prompt[None], max_new_tokens=args.max_new_tokens, num_steps=args.steps,
        topk=args.topk, num_draft_tokens=_nodes(args), stop_ids=[pair.eos_id], callback=callback,
    )


def _show(pair: Pair, prompt: Tensor, args: argparse.Namespace) -> GenerationOutput:
    from rich.console import Console

    from .display import LiveText, show_prompt

    console = Console()
    show_prompt(console, pair.decode(prompt.tolist()))
    with LiveText(console, pair, args.max_new_tokens) as live:
        return _generate(pair, prompt, args, live.add)


def _show_summary(statistics: GenerationStatistics, check: dict[str, Any]) -> None:
    from rich.console import Console

    from .display import summary_table

    extra: dict[str, str] = {}
    if check:
        extra["same text as plain greedy"] = "yes" if check["equals_greedy"] else "NO"
        extra["whole time, drafting"] = f"{statistics.seconds:.2f} s"
        extra["whole time, plain greedy"] = f"{check['greedy_seconds']:.2f} s"
    Console().print(summary_table(statistics, extra))


def _check_against_greedy(pair: Pair, prompt: Tensor, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    start = time.perf_counter()
    plain = pair.greedy(prompt, max_new_tokens, [pair.eos_id])
    return {"equals_greedy": plain == ids, "greedy_seconds": time.perf_counter() - start}


def _as_json(
    pair: Pair, statistics: GenerationStatistics, ids: list[int], check: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    figures = statistics.as_dict()
    if "greedy_seconds" in check:
        figures["times"]["greedy_seconds"] = check["greedy_seconds"]
    return {
        **figures,
        "text": pair.decode(ids),
        "head": args.head,
        "steps": args.steps,
        "topk": args.topk,
        "nodes": _nodes(args),
        "device": args.device,
        "equals_greedy": check.get("equals_greedy"),
    }
