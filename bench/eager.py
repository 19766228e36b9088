"""What a call from Python costs on the host: each op, and draft() by the step, outside a CUDA graph.

    python -m mtp_kernels.bench.eager --out FILE [--device cpu] [--models E4B,31B]

Calls are queued without waiting for the device; the time is that until the last of them has returned. On a CPU, where
a call is its work, it is both.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..draft import draft
from ..ops import OPS
from ..weights import AssistantWeights
from . import machine
from .case import Case
from .inputs import config_of
from .ops import bench_of
from .run_ops import OpProblem, ours
from .run_steps import StepProblem
from .served import served_by

CALLS = 20  # in a sample: all of them, of the longest step too, fit into the device's queue
SAMPLES = 15
STEPS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="E4B,31B", help="sizes, separated by commas (default E4B,31B)")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    name, about = machine.describe(device)
    with torch.no_grad():
        rows = [row for model in args.models.split(",") for row in host_times(model, device, args.context)]
        x = torch.zeros(1024, device=device)
        yardstick = host_us(lambda: x.add_(1), device, 10 * CALLS)
    words = sys.argv[1:] if arguments is None else arguments
    record = {
        "command": shlex.join(["python", "-m", "mtp_kernels.bench.eager", *words]),
        "commit": machine.commit(),
        "device_name": name,
        "machine": about,
        "add_us": round(yardstick, 2),
        "rows": rows,
    }
    for row in rows:
        print(f"{row['model']:8} {row['name']:18} {row['variant']:20} {row['host_us']:9.1f} us  {row['served_by']}")
    print(f"x.add_(1): {yardstick:.1f} us")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def host_times(model: str, device: torch.device, context: int) -> list[dict[str, Any]]:
    """Of every op of a model, and of a draft step in draft()."""
    rows = []
    for op in OPS:
        for variant in bench_of(op).variants(config_of(model)):
            case = Case("op", op, model, context=context, variant=variant, mode="eager", warm=True)
            problem = OpProblem(case, device, 0)
            candidate = ours(case, problem)
            us = host_us(candidate.bind(problem.sets[0]), device, CALLS)
            rows.append(_row(model, op, variant, us, candidate.implementation))
            del problem, candidate
    case = Case("round", "chain", model, context=context, num_steps=STEPS, mode="eager")
    one = StepProblem(case, device, AssistantWeights.synthetic(config_of(model), device=device)).inputs

    def drafted() -> Any:
        return draft(one.weights, one.kv, one.seed_ids, one.state, one.positions, STEPS)

    rows.append(_row(model, "draft() by the step", "", host_us(drafted, device, 1) / STEPS, served_by(drafted)))
    return rows


def host_us(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Median microseconds until a call returns; nothing is queued in front of the first of a sample."""
    spent = []
    for number in range(SAMPLES + 2):  # two to warm up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if number >= 2:
            spent.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(spent)


def _row(model: str, name: str, variant: str, us: float, served: str) -> dict[str, Any]:
    return {"model": model, "name": name, "variant": variant, "host_us": round(us, 2), "served_by": served}


if __name__ == "__main__":
    sys.exit(main())
