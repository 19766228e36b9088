"""Stage 3: the dense drafter, unrolled over several draft steps from every position of a row at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from . import models
from .compiled import Compiled
from .loop import Stage, train

NUM_STEPS = 5
STEP_DECAY = 0.9  # a later step is only reached when the earlier ones were right
OFF_PATH = 0.3  # weight of a step behind a token that the greedy target would not have chosen
HARD = 0.5  # share of the loss on the target's greedy choice; the rest is on its whole distribution

# (normed [.., hidden], target_logits [.., vocab]) -> (loss [..], right [..])
HeadLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def train_assistant(
    assistant: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, rows: Tensor, head_loss: HeadLoss, stage: Stage,
    *, batch: int, generator: torch.Generator, compile_: bool,
) -> int:
    """rows [n, length] of `make_rows`. Returns the steps taken."""
    draft_step = Compiled(models.draft_step, compile_)
    target_of = Compiled(_target, compile_)
    device, length = rows.device, rows.size(1)
    masks = models.causal_masks(length, device)
    order = torch.empty(0, dtype=torch.long, device=device)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal order
        if order.numel() < batch:
            order = torch.randperm(rows.size(0), generator=generator, device=device)
        ids, order = rows[order[:batch]], order[batch:]
        with torch.no_grad():
            hidden, logits, kv = target_of(target, ids, masks)
        return _unrolled_loss(assistant, target, ids, hidden, logits, kv, head_loss, draft_step)

    assistant.train().requires_grad_(True)
    steps = train(stage, assistant.parameters(), step, device)
    assistant.eval().requires_grad_(False)
    return steps


def dense_head_loss(assistant: Gemma4AssistantForCausalLM, compile_: bool) -> HeadLoss:
    loss = Compiled(_dense_loss, compile_)
    return lambda normed, target_logits: loss(normed, assistant.lm_head.weight, target_logits)


def distill(logits: Tensor, probs: Tensor, label: Tensor) -> Tensor:
    """Cross entropy of logits [.., n] with the target's distribution and with its greedy choice, mixed: [..]."""
    logprobs = F.log_softmax(logits, dim=-1)
    soft = -(probs * logprobs).sum(-1)
    hard = -logprobs.gather(-1, label[..., None]).squeeze(-1)
    return (1 - HARD) * soft + HARD * hard


def _unrolled_loss(
    assistant: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, ids: Tensor, hidden: Tensor,
    target_logits: Tensor, kv: models.KVStates, head_loss: HeadLoss, draft_step: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """A round starts at every position p = 1 .. length - NUM_STEPS; its step j is fed token p + j - 1.

    Seed: token p and the hidden of row p - 1, which predicted it. Step j is scored against the target's row
    p + j - 1. Position p and the rows 0..p-1 stay as they are over the round.
    """
    length = ids.size(1)
    queries = length - NUM_STEPS
    positions = torch.arange(1, queries + 1, device=ids.device)
    masks = models.draft_masks(positions, length)
    embeds = target.model.embed_tokens(ids)
    greedy = target_logits.argmax(-1)
    state = hidden[:, :queries].float().detach().requires_grad_()  # as the later states are: one graph for all steps
    on_path = torch.ones_like(ids[:, 1 : queries + 1], dtype=torch.float32)
    loss, weights = torch.zeros((), device=ids.device), torch.zeros((), device=ids.device)
    accepted, run = torch.zeros((), device=ids.device), None
    for j in range(NUM_STEPS):
        rows = slice(1 + j, 1 + j + queries)
        normed, state = draft_step(assistant, embeds[:, rows], state, positions[None], kv, masks)
        state = state.float()
        step_loss, right = head_loss(normed, target_logits[:, rows])
        weight = STEP_DECAY**j * (OFF_PATH + (1 - OFF_PATH) * on_path)
        loss = loss + (step_loss * weight).sum()
        weights = weights + weight.sum()
        if j < 4:
            run = right if run is None else run * right
            accepted = accepted + run[:, queries // 2 + 8 :].mean()  # the greedy half
            on_path = on_path * (greedy[:, rows] == ids[:, 2 + j : 2 + j + queries])
    # Over all starts, not only those where a round would start: a little below the evaluation's figure.
    return loss / weights, {"loss": (loss / weights).detach(), "tokens a round, chain of 4": 1 + accepted}


def _target(
    target: Gemma4ForCausalLM, ids: Tensor, masks: models.Masks
) -> tuple[Tensor, Tensor, models.KVStates]:
    hidden, kv = models.target_forward(target, ids, masks)
    return hidden, target.lm_head(hidden), kv


def _dense_loss(normed: Tensor, head: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(normed, head).float()
    label = target_logits.argmax(-1)
    loss = distill(logits, target_logits.float().softmax(-1), label)
    return loss, (logits.argmax(-1) == label).float()
