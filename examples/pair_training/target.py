"""Stage 1: the target, an ordinary language model on crops of the text."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma4ForCausalLM

from . import models
from .compiled import Compiled
from .loop import Stage, autocast, train


def train_target(
    target: Gemma4ForCausalLM, tokens: Tensor, held_out: dict[str, np.ndarray], stage: Stage, *,
    batch: int, length: int, max_rows: int | None, generator: torch.Generator, compile_: bool,
) -> int:
    """tokens [n] on the target's device; held-out modules are only looked at, never trained on. Returns the steps."""
    device = tokens.device
    masks = models.causal_masks(length, device)
    loss_of = Compiled(_loss, compile_)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_of(target, crops(tokens, batch, length + 1, generator), masks)
        return loss, {"loss": loss.detach()}

    def report(progress: float) -> None:
        loss, _ = held_out_loss(target, held_out, device, max_rows=max_rows)
        print(f"{stage.name}: held-out loss {loss:.4f}", flush=True)

    target.train()
    steps = train(stage, target.parameters(), step, device, report)
    target.eval().requires_grad_(False)
    return steps


def crops(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Random pieces of the text: [batch, length]."""
    start = torch.randint(tokens.numel() - length, (batch, 1), generator=generator, device=tokens.device)
    return tokens[start + torch.arange(length, device=tokens.device)]


@torch.no_grad()
def held_out_loss(
    target: Gemma4ForCausalLM, held_out: dict[str, np.ndarray], device: torch.device, length: int = 512,
    max_rows: int | None = None,
) -> tuple[float, int]:
    """(nats a token, tokens) over the held-out modules, `max_rows` pieces of each, with no context before a piece."""
    total, count = 0.0, 0
    masks = models.causal_masks(length, device)
    for ids in held_out.values():
        rows = torch.tensor(ids[: ids.size // (length + 1) * (length + 1)].astype(np.int64), device=device)
        if rows.numel() == 0:
            continue
        rows = rows.view(-1, length + 1)[:max_rows]
        with autocast(device):
            for part in rows.split(16):
                total += float(_loss(target, part, masks)) * part.size(0) * length
                count += part.size(0) * length
    return (total / count if count else math.nan), count


def _loss(target: Gemma4ForCausalLM, ids: Tensor, masks: models.Masks) -> Tensor:
    hidden, _ = models.target_forward(target, ids[:, :-1], masks)
    logits = target.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
