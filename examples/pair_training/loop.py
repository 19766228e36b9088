"""One training loop for all stages: AdamW, a cosine over the stage's time (or steps), bf16 autocast on a GPU."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """How long a stage runs: until `deadline` (time.monotonic), or for `steps`."""

    name: str
    lr: float
    deadline: float | None
    steps: int | None = None
    warmup: float = 0.02  # share of the stage
    weight_decay: float = 0.1


def train(
    stage: Stage, parameters: Iterable[nn.Parameter], loss_fn: Callable[[], tuple[Tensor, dict[str, Tensor]]],
    device: torch.device, on_progress: Callable[[float], None] | None = None,
) -> int:
    """Minimise loss_fn() -> (loss, figures to log); returns the number of steps taken."""
    parameters = [p for p in parameters if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": stage.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=stage.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    start = time.monotonic()
    step, next_log = 0, 0.0
    while (progress := _progress(stage, start, step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * _schedule(progress, stage.warmup)
        with autocast(device):
            loss, figures = loss_fn()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 1:
            _sync(device)
            print(f"{stage.name}: first step (compiling) {time.monotonic() - start:.1f} s", flush=True)
            start = time.monotonic()  # the schedule begins behind it, so that the warm-up is not lost
        if progress >= next_log:
            numbers = "  ".join(f"{name} {float(value):.4f}" for name, value in figures.items())
            spent = time.monotonic() - start
            print(f"{stage.name}: {progress:4.0%}  step {step:5d}  {spent:5.1f} s  {numbers}", flush=True)
            if on_progress is not None:
                on_progress(progress)
            next_log += 0.1
    _sync(device)
    print(f"{stage.name}: {step} steps in {time.monotonic() - start:.1f} s", flush=True)
    return step


def autocast(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _progress(stage: Stage, start: float, step: int) -> float:
    if stage.steps is not None:
        return step / stage.steps
    assert stage.deadline is not None
    return (time.monotonic() - start) / max(stage.deadline - start, 1e-3)


def _schedule(progress: float, warmup: float) -> float:
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
