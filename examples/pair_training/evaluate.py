"""Rounds of drafting on the target's greedy continuations of held-out prompts, in plain PyTorch and fp32.

A greedy round accepts exactly the drafted tokens that the continuation has, and its seed is one of the continuation's
rows. So the drafts of a round that starts at any position can be computed for all positions at once, fed with
the true tokens up to the first miss, and rounds are then read off position by position.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from . import models
from .centroids import candidate_logits
from .continuations import generate
from .models import EOS

TOPK, NUM_NODES = 4, 16


def held_out_prompts(held_out: dict[str, np.ndarray], length: int, per_module: int) -> Tensor:
    """[n, length]: `per_module` prompts of each module, `length` tokens apart from each other, from its start on."""
    starts = [2 * length * i for i in range(per_module)]
    pieces = [ids[s : s + length].astype(np.int64) for ids in held_out.values() for s in starts]
    return torch.from_numpy(np.stack([p for p in pieces if p.size == length]))


@torch.no_grad()
def evaluate(
    target: Gemma4ForCausalLM, assistants: dict[str, Gemma4AssistantForCausalLM], prompts: Tensor, new_tokens: int,
    steps: int = 4,
) -> dict:
    """Figures of each head: mean tokens a round (accepted + 1), by chain and by tree, and acceptance by depth."""
    start, length = prompts.size(1), prompts.size(1) + new_tokens
    ids = generate(target, prompts, length, start)
    hidden, kv = models.target_forward(target, ids, models.causal_masks(length, ids.device))
    same = target.lm_head(hidden[:, start - 1 : -1]).argmax(-1) == ids[:, start:]
    ends = [_end(row, start) for row in ids]
    report: dict = {
        "prompts": ids.size(0),
        "prompt_tokens": start,
        "generated_tokens": sum(end - start for end in ends),
        "argmax_differs_without_cache": int((~same).sum()),
        "repeated_4_grams": float(np.mean([_repeats(row[start:end].tolist()) for row, end in zip(ids, ends)])),
        "steps": steps,
        "heads": {},
    }
    for name, assistant in assistants.items():
        accepted = {
            "chain": _accepted(target, assistant, ids, hidden, kv, start, steps, topk=1, nodes=steps + 1),
            "tree": _accepted(target, assistant, ids, hidden, kv, start, steps, topk=TOPK, nodes=NUM_NODES),
        }
        report["heads"][name] = {shape: _rounds(a, ids, start, ends, steps) for shape, a in accepted.items()}
    return report


def _accepted(
    target: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM, ids: Tensor, hidden: Tensor, kv: models.KVStates,
    start: int, steps: int, topk: int, nodes: int,
) -> Tensor:
    """Accepted tokens of a round that starts at each position p = start .. length - steps - 1: [batch, queries].

    The frontier's rows of one position are neighbours in the query dimension; they see the same rows of the target.
    """
    batch, length = ids.shape
    positions = torch.arange(start, length - steps, device=ids.device)
    queries = positions.numel()
    tokens, state = ids[:, positions, None], hidden[:, positions - 1, None]  # [batch, queries, rows(, backbone)]
    scores = torch.zeros(batch, queries, 1, device=ids.device)
    frontier = torch.full_like(tokens, -1)
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # candidates of each step: score, token, parent
    base = 0
    for _ in range(steps):
        rows = tokens.size(2)
        at = positions.repeat_interleave(rows)
        normed, state = models.draft_step(
            assistant, target.model.embed_tokens(tokens.flatten(1)), state.flatten(1, 2), at[None], kv,
            models.draft_masks(at, length),
        )
        dense = assistant.masked_embedding is None
        logits = assistant.lm_head(normed) if dense else candidate_logits(normed, assistant)
        best = logits.log_softmax(-1).topk(topk, dim=-1)
        cand_score = (scores[..., None] + best.values.view(batch, queries, rows, topk)).flatten(2)
        cand_token = best.indices.view(batch, queries, rows * topk)
        found.append((cand_score, cand_token, frontier.repeat_interleave(topk, dim=-1)))
        scores, index = cand_score.topk(topk, dim=-1)
        tokens, frontier, base = cand_token.gather(-1, index), base + index, base + rows * topk
        state = state.view(batch, queries, rows, -1).gather(
            2, (index // topk)[..., None].expand(-1, -1, -1, state.size(-1))
        )
    return _walk(found, ids, positions, nodes)


def _walk(found: list[tuple[Tensor, Tensor, Tensor]], ids: Tensor, positions: Tensor, nodes: int) -> Tensor:
    """Keep the nodes - 1 best candidates, follow the true tokens through them: [batch, queries] depths reached."""
    scores = torch.cat([f[0] for f in found], dim=-1)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, scores.sort(dim=-1, descending=True, stable=True).indices[..., : nodes - 1], True)
    node = torch.full_like(ids[:, positions], -1)
    alive = torch.ones_like(node, dtype=torch.bool)
    depth = torch.zeros_like(node)
    base = 0
    for step, (score, token, parent) in enumerate(found):
        here = kept[..., base : base + score.size(-1)]
        true = ids[:, positions + step + 1]
        match = here & (parent == node[..., None]) & (token == true[..., None])
        alive = alive & match.any(-1)
        depth = depth + alive
        node = base + match.int().argmax(-1)
        base += score.size(-1)
    return depth


def _rounds(accepted: Tensor, ids: Tensor, start: int, ends: list[int], steps: int) -> dict:
    """Play the rounds of every row; a round counts while its deepest draft lies before the row's end.

    A round is new when the `steps` tokens it has to guess did not stand in this order anywhere before in the row.
    """
    counts: list[int] = []
    new: list[bool] = []
    for row, tokens, end in zip(accepted.tolist(), ids.tolist(), ends):
        p = start
        while p + steps < end:
            seen = {tuple(tokens[i : i + steps]) for i in range(p + 1)}
            new.append(tuple(tokens[p + 1 : p + 1 + steps]) not in seen)
            counts.append(row[p - start])
            p += row[p - start] + 1
    depth, is_new = np.array(counts), np.array(new, dtype=bool)
    return {
        "rounds": len(counts),
        "tokens_a_round": float(depth.mean() + 1) if len(counts) else float("nan"),
        "accepted_by_depth": [float((depth > j).mean()) for j in range(steps)],
        "new_rounds": int(is_new.sum()),
        "tokens_a_new_round": float(depth[is_new].mean() + 1) if is_new.any() else float("nan"),
    }


def _end(row: Tensor, start: int) -> int:
    """Where the continuation ends: behind its eos, or the row's end."""
    stops = (row[start:] == EOS).nonzero()
    return start + int(stops[0]) + 1 if stops.numel() else row.numel()


def _repeats(ids: list[int]) -> float:
    """The share of 4-grams that occurred before in the same continuation; tiny greedy models tend to loop."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
