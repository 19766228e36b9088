"""Stage 2: rows whose second half is the target's own greedy continuation, which is what drafters must guess."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, Gemma4ForCausalLM

from .loop import autocast
from .models import no_per_layer_inputs
from .target import crops


def make_rows(
    target: Gemma4ForCausalLM, tokens: Tensor, count: int, length: int, batch: int, generator: torch.Generator
) -> Tensor:
    """[count, length]: the second half greedy. In every other batch the quarter before it is sampled from the target,
    so that drafters also see contexts that are not in the text the target learned by heart."""
    rows = []
    for i in range(0, count, batch):
        size = min(batch, count - i)
        real = length // 4 if (i // batch) % 2 else length // 2
        prompts = crops(tokens, size, real, generator)
        with autocast(tokens.device):
            rows.append(generate(target, prompts, length, length // 2, generator))
    return torch.cat(rows)


@torch.no_grad()
def generate(
    target: Gemma4ForCausalLM, prompts: Tensor, length: int, greedy_from: int, generator: torch.Generator | None = None
) -> Tensor:
    """prompts [batch, n] -> [batch, length]: sampled at temperature 1 up to column `greedy_from`, then greedy."""
    parameters = inspect.signature(target.model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.2x
    cache = DynamicCache(config=target.config)
    ids, new = prompts, prompts
    while ids.size(1) < length:
        positions = torch.arange(ids.size(1) - new.size(1), ids.size(1), device=ids.device)
        hidden = target.model(
            inputs_embeds=target.model.embed_tokens(new),
            per_layer_inputs=no_per_layer_inputs(target, new),
            position_ids=positions[None],
            use_cache=True,
            **{cache_name: cache},
        ).last_hidden_state
        logits = target.lm_head(hidden[:, -1])
        if ids.size(1) < greedy_from:
            new = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        else:
            new = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
    return ids
