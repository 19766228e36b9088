"""Reference of verify_sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ._tree import accepted_path, at, in_range, list_children, take_rows


def verify_sample(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root, on to the first child that is accepted; where none is, draw from what the tries have left."""
    ids, rows = draft_ids.long(), retrieve_index.long()  # [batch, N]
    batch, num_nodes = ids.shape
    has_row = in_range(rows, target_probs.numel() // max(target_probs.size(-1), 1))
    children = list_children(retrieve_next_token, retrieve_next_sibling)  # [batch, N, N]
    if draft_probs is not None:
        children = children[:, :, :1]

    node = torch.zeros(batch, dtype=torch.int64, device=ids.device)
    walking = has_row[:, 0]
    p = _distribution(take_rows(target_probs, rows[:, 0], 1))  # [batch, vocab], of the node that the walk stands at
    left = p  # what the next token is drawn from if the walk ends here
    nodes, taken = [], []
    for _ in range(min(max_depth, num_nodes - 1)):
        tried = at(children, node)  # [batch, tries]
        child = tried.clamp(min=0)
        can_try = (tried >= 0) & has_row.gather(1, child)
        tokens, u = ids.gather(1, child), uniform.double().gather(1, child)
        if draft_probs is None:
            accept, rest = _try_in_turn(p, tokens, u, can_try)
        else:
            accept, rest = _try_sampled(p, _distribution(at(draft_probs, node)), tokens, u, can_try)
        walking = walking & accept.any(1)
        node = torch.where(walking, child.gather(1, accept.byte().argmax(1, keepdim=True)).squeeze(1), node)
        p = _distribution(take_rows(target_probs, at(rows, node), 1))
        left = torch.where(walking.unsqueeze(1), p, rest)
        nodes.append(node)
        taken.append(walking)
    bonus = _draw(torch.where(left.amax(1, keepdim=True) > 0, left, p), uniform_final.double())
    return accepted_path(nodes, taken, torch.where(at(has_row, node), bonus, -1), ids, rows, max_depth)


def _distribution(probs: Tensor) -> Tensor:
    """Rows that add up to 1, in fp64; what is no probability counts as 0; a row without any stays 0."""
    probs = torch.where(torch.isfinite(probs) & (probs > 0), probs.double(), 0.0)
    total = probs.sum(-1, keepdim=True)
    return torch.where(total > 0, probs / total, 0.0)


def _probability(p: Tensor, tokens: Tensor) -> Tensor:
    """p[b, tokens[b, j]], and 0 for a token outside the vocabulary."""
    vocab = p.size(1)
    return torch.where(in_range(tokens, vocab), p.gather(1, tokens.clamp(0, vocab - 1)), 0.0)


def _try_in_turn(p: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each child would be accepted once those before it were rejected, and what is left when all are.

    A rejected token loses its mass, so the next one is tried against what remains; a second child with the same token
    has none.
    """
    vocab, tries = p.size(1), tokens.size(1)
    same = (tokens.unsqueeze(1) == tokens.unsqueeze(2)) & can_try.unsqueeze(1)  # [b, j, i]: i may be j's double
    before = torch.ones(tries, tries, dtype=torch.bool, device=p.device).tril(-1)
    mass = torch.where(can_try & ~(same & before).any(-1), _probability(p, tokens), 0.0)  # [batch, tries]
    remaining = (p.sum(1, keepdim=True) - (mass.cumsum(1) - mass)).clamp(min=0)
    accept = (mass > 0) & (u * remaining < mass)

    column = torch.where(can_try & in_range(tokens, vocab), tokens, vocab)  # one more column takes what is not tried
    return accept, torch.nn.functional.pad(p, (0, 1)).scatter(1, column, 0.0)[:, :vocab]


def _try_sampled(p: Tensor, q: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
    """Accept with probability min(1, p / q), else max(p - q, 0) is left (Leviathan et al. 2023)."""
    mass = _probability(p, tokens)
    accept = can_try & (mass > 0) & (u * _probability(q, tokens) < mass)
    return accept, torch.where(can_try, (p - q).clamp(min=0), p)


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """The first id with weight > 0 whose cumulative weight exceeds u * total; 0 for a row without any weight."""
    cumulative = weights.cumsum(1)
    hit = (cumulative > u.unsqueeze(1) * cumulative[:, -1:]) & (weights > 0)
    ids = torch.arange(weights.size(1), device=weights.device)
    last = torch.where(weights > 0, ids, 0).amax(1)  # where rounding, or a u of 1, leaves none
    return torch.where(hit.any(1), hit.byte().argmax(1), last)
