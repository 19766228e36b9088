"""What the tests of the tree ops share: the ops' rules again in plain Python, list by list, and small trees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from harness import implementations
from torch import Tensor

import mtp_kernels

INDICES = [torch.int32, torch.int64]
INT_MIN = -(2**31)
LINKS = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")

# 5 -> (7 -> (1, 2 -> 6)), (8 -> 4): node i has the token TOKENS[i] and the parent PARENTS[i].
TOKENS = [5, 7, 8, 1, 2, 4, 6]
PARENTS = [-1, 0, 0, 1, 1, 2, 4]


def places(op: str) -> list[tuple[str, str]]:
    """(device, implementation) for every implementation of `op` that this machine has, where it runs."""
    found = []
    for row in mtp_kernels.report().rows:
        if row.op == op:
            found += [(row.device, i) for i in implementations(op) if i in ("reference", row.serves)]
    return found


def interpreted(device: str, implementation: str) -> bool:
    """Whether this is Triton's interpreter, which takes milliseconds a program."""
    return (device, implementation) == ("cpu", "triton")


def on(device: str, *values: Any, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Tensors of lists, on the device; what is a tensor already only moves, the rest stays."""
    made = [torch.tensor(v, dtype=dtype or torch.int64) if isinstance(v, list) else v for v in values]
    return tuple(m.to(device) if isinstance(m, Tensor) else m for m in made)


def rank(scores: Sequence[float], k: int) -> list[int]:
    """The indices of the k highest scores, best first; NaN counts as -inf, the lowest index wins a tie."""
    clean = [-math.inf if math.isnan(s) else s for s in scores]
    return sorted(range(len(clean)), key=lambda i: (-clean[i], i))[:k]


def links_of(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """retrieve_next_token and retrieve_next_sibling of a tree given by its parents."""
    children = [[j for j, p in enumerate(parents) if p == i and j > 0] for i in range(len(parents))]
    following = {a: b for own in children for a, b in itertools.pairwise(own)}
    return [own[0] if own else -1 for own in children], [following.get(i, -1) for i in range(len(parents))]


def path_to_root(parents: Sequence[int], node: int) -> list[int]:
    """The node and its ancestors, as far as parents lead."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def build(root_id: int, scores: Sequence[float], ids: Sequence[int], parent: Sequence[int], root_position: int,
          num_nodes: int, request: int) -> tuple[Any, ...]:
    """tree_build of one request."""
    kept = sorted(rank(scores, num_nodes - 1))
    node_of = {candidate: 1 + place for place, candidate in enumerate(kept)}
    parents = [-1]
    for candidate in kept:
        wanted = parent[candidate]
        parents.append(0 if wanted == -1 else node_of.get(wanted, -1) if wanted < candidate else -1)
    paths = [path_to_root(parents, node) for node in range(num_nodes)]
    positions = [root_position + len(path) - 1 for path in paths]
    mask = [[j in path for j in range(num_nodes)] for path in paths]
    rows = [request * num_nodes + node for node in range(num_nodes)]
    return [root_id, *(ids[c] for c in kept)], positions, parents, kept, mask, rows, *links_of(parents)


def children(node: int, next_token: Sequence[int], next_sibling: Sequence[int]) -> Iterator[int]:
    """In the order of the links; a link outside 1..N - 1 ends them, and N of them are enough."""
    child = next_token[node]
    for _ in next_token:
        if not 0 < child < len(next_token):
            return
        yield child
        child = next_sibling[child]


def walk(ids: Sequence[int], rows: Sequence[int], next_token: Sequence[int], next_sibling: Sequence[int],
         target: Sequence[int], max_depth: int) -> tuple[list[int], int, list[int]]:
    """verify_greedy of one request; `target` is flat."""
    path = [0]
    there = 0 <= rows[0] < len(target)
    while there and len(path) - 1 < min(max_depth, len(ids) - 1):
        token = target[rows[path[-1]]]
        hits = [c for c in children(path[-1], next_token, next_sibling)
                if ids[c] == token and 0 <= rows[c] < len(target)]
        if not hits:
            break
        path.append(hits[0])
    return result(path, target[rows[path[-1]]] if there else -1, ids, rows, max_depth)


def walk_all(draft: Sequence[Sequence[Sequence[int]]], target: Sequence[int], max_depth: int) -> list[list[Any]]:
    """verify_greedy of a batch: its three results; `draft` is ids, rows, next_token and next_sibling, [batch, N]."""
    made = [walk(ids, rows, child, sibling, target, max_depth) for ids, rows, child, sibling in zip(*draft)]
    return [[request[i] for request in made] for i in range(3)]


def result(path: Sequence[int], last: int, ids: Sequence[int], rows: Sequence[int], max_depth: int
           ) -> tuple[list[int], int, list[int]]:
    """accept_index, num_accepted and accept_ids of a walk along `path` that ends with the token `last`."""
    padding = [-1] * (max_depth + 1 - len(path))
    return [*(rows[n] for n in path), *padding], len(path) - 1, [*(ids[n] for n in path[1:]), last, *padding]


Distribution = dict[int, Fraction]


def distribution(probs: Sequence[float]) -> Distribution:
    """The tokens that have a probability, which add up to 1 exactly."""
    good = {x: Fraction(p) for x, p in enumerate(probs) if math.isfinite(p) and p > 0}
    total = sum(good.values())
    return {x: p / total for x, p in good.items()}


def sample(ids: Sequence[int], rows: Sequence[int], next_token: Sequence[int], next_sibling: Sequence[int],
           target: Sequence[Sequence[float]], uniform: Sequence[float], uniform_final: float, max_depth: int,
           draft: Sequence[Sequence[float]] | None = None) -> tuple[list[int], int, list[int]]:
    """verify_sample of one request in exact arithmetic; `target` is flat."""
    path = [0]
    there = 0 <= rows[0] < len(target)
    left: Distribution = {}
    while there:
        p = left = distribution(target[rows[path[-1]]])
        if len(path) - 1 == min(max_depth, len(ids) - 1):
            break
        tried = list(children(path[-1], next_token, next_sibling))
        if draft is None:
            accepted, left = in_turn(p, tried, ids, rows, uniform, len(target))
        else:
            accepted, left = sampled(p, distribution(draft[path[-1]]), tried[:1], ids, rows, uniform, len(target))
        if accepted is None:
            left = left or p
            break
        path.append(accepted)
    return result(path, draw(left, uniform_final) if there else -1, ids, rows, max_depth)


def sample_all(draft: Sequence[Sequence[Sequence[int]]], target: Sequence[Sequence[float]],
               uniform: Sequence[Sequence[float]], uniform_final: Sequence[float], max_depth: int,
               draft_probs: Sequence[Sequence[Sequence[float]]] | None = None) -> list[list[Any]]:
    """verify_sample of a batch: its three results."""
    probs = [None] * len(uniform) if draft_probs is None else draft_probs
    made = [sample(ids, rows, child, sibling, target, u, final, max_depth, q)
            for (ids, rows, child, sibling), u, final, q in zip(zip(*draft), uniform, uniform_final, probs)]
    return [[request[i] for request in made] for i in range(3)]


def in_turn(p: Distribution, tried: Sequence[int], ids: Sequence[int], rows: Sequence[int], uniform: Sequence[float],
            num_rows: int) -> tuple[int | None, Distribution]:
    left = dict(p)
    for child in tried:
        if not 0 <= rows[child] < num_rows:
            continue
        if Fraction(uniform[child]) * sum(left.values()) < left.get(ids[child], 0):
            return child, left
        left.pop(ids[child], None)
    return None, left


def sampled(p: Distribution, q: Distribution, tried: Sequence[int], ids: Sequence[int], rows: Sequence[int],
            uniform: Sequence[float], num_rows: int) -> tuple[int | None, Distribution]:
    for child in tried:
        if not 0 <= rows[child] < num_rows:
            continue
        if Fraction(uniform[child]) * q.get(ids[child], 0) < p.get(ids[child], 0):
            return child, p
        return None, {x: mass - q.get(x, 0) for x, mass in p.items() if mass > q.get(x, 0)}
    return None, p


def draw(weights: Distribution, u: float) -> int:
    """The first token whose cumulative weight exceeds u * total; 0 where there is no weight."""
    threshold = Fraction(u) * sum(weights.values())
    cumulative = Fraction(0)
    for token, weight in weights.items():
        cumulative += weight
        if cumulative > threshold:
            return token
    return 0


def probabilities(*shape: int, seed: int) -> Tensor:
    """Distributions over the last dimension."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(*shape, generator=generator) * 0.8, -1)
