"""The exact distribution of the first tokens that a target samples, and a chi-square test against it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from generation_cases import VOCAB, tiny_pair
from torch import Tensor

PROMPT = (3, 1, 10)
DEPTH = 4  # tokens whose joint distribution is known exactly


@functools.cache
@torch.no_grad()
def exact(head: str, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probability of every continuation of PROMPT by DEPTH tokens [vocab] * DEPTH, in fp64: whole forwards of
    transformers' model, and transformers' own warpers."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warp = LogitsProcessorList(warpers)
    target = tiny_pair(head).target
    joint = torch.ones((), dtype=torch.float64)
    for depth in range(DEPTH):
        powers = VOCAB ** torch.arange(depth - 1, -1, -1)
        tails = torch.arange(VOCAB**depth).unsqueeze(1) // powers % VOCAB  # [vocab ** depth, depth]
        ids = torch.cat([torch.tensor(PROMPT).expand(len(tails), -1), tails], dim=1)
        logits = target(input_ids=ids, use_cache=False).logits[:, -1]
        step = warp(ids, logits.float()).double().softmax(-1)  # [vocab ** depth, vocab]
        joint = joint.unsqueeze(-1) * step.view(*[VOCAB] * depth, VOCAB)
    return joint


def p_value(tokens: Tensor, probs: Tensor) -> float:
    """Of a chi-square test of draws [n, depth] against their joint probabilities; rare outcomes count as one.

    0 where something was drawn that cannot be.
    """
    places = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.T:
        places = places * VOCAB + column
    counts, wanted = torch.bincount(places, minlength=probs.numel()).double(), probs.flatten() * len(tokens)
    if counts[wanted == 0].any():
        return 0.0
    rare = wanted < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    if wanted[-1] < 5:  # too little even together: the last common one takes it
        counts, wanted = (torch.cat([x[:-2], x[-2:].sum()[None]]) for x in (counts, wanted))
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64), statistic / 2))


def p_values(tokens: Tensor, probs: Tensor) -> tuple[float, float]:
    """Of the first three tokens jointly, and of the last two: [n, DEPTH] draws."""
    return p_value(tokens[:, :3], probs.sum(3)), p_value(tokens[:, 2:], probs.sum((0, 1)))
