"""verify_sample: the distribution of its output is the target's, and the usual mistakes are found by the same test."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import call, forced
from torch import Tensor
from tree_cases import interpreted, links_of, on, places, probabilities

OP = "verify_sample"
reference_module = importlib.import_module("mtp_kernels.reference.verify_sample")
Verify = Callable[..., tuple[Tensor, Tensor, Tensor]]


# The output's distribution. Every completed output of two tokens has an exact probability under the target.

VOCAB = 5


def tree_outputs(verify: Verify, device: str, batch: int, max_depth: int, dtype: torch.dtype = torch.float32
                 ) -> tuple[Tensor, Tensor]:
    """First two tokens [batch, 2] of the output over a fixed tree, and their exact distribution [vocab, vocab].

    The root's children have the tokens 1, 3, 1 (a double) and 4; the first has the children 0 and 2, the second 2.
    """
    tokens, parents = [0, 1, 3, 1, 4, 0, 2, 2], [-1, 0, 0, 0, 0, 1, 1, 2]
    first, then = probabilities(VOCAB, seed=4).to(dtype), probabilities(VOCAB, VOCAB, seed=5).to(dtype)
    first[4] = 0  # a draft token that the target never says
    node_probs = torch.stack([first, *(then[t] for t in tokens[1:])])  # [N, vocab]; the last level is never followed
    links = [torch.tensor(x).expand(batch, -1) for x in (tokens, *links_of(parents))]
    num_nodes = len(tokens)
    rows = torch.arange(batch * num_nodes).view(batch, num_nodes)
    generator = torch.Generator().manual_seed(6)
    uniform, final = torch.rand(batch, num_nodes, generator=generator), torch.rand(batch, generator=generator)
    _, num_accepted, accept_ids = verify(*on(
        device, links[0], rows, links[1], links[2], node_probs.expand(batch, -1, -1), uniform, final), max_depth)
    return complete(accept_ids.cpu(), num_accepted.cpu(), then), joint(first, then)


def chain_outputs(verify: Verify, device: str, batch: int, max_depth: int, dtype: torch.dtype = torch.float32
                  ) -> tuple[Tensor, Tensor]:
    """The same for sampled chains of two tokens: each request's own draft, from q and q(. | first token)."""
    first, then = probabilities(VOCAB, seed=4).to(dtype), probabilities(VOCAB, VOCAB, seed=5).to(dtype)
    draft_first, draft_then = probabilities(VOCAB, seed=7).to(dtype), probabilities(VOCAB, VOCAB, seed=8).to(dtype)
    first[4] = 0
    draft_first[0] = 0
    generator = torch.Generator().manual_seed(9)
    one = torch.multinomial(draft_first.float(), batch, replacement=True, generator=generator)
    two = torch.multinomial(draft_then.float()[one], 1, generator=generator)[:, 0]
    links = [torch.tensor(x).expand(batch, -1) for x in ([1, 2, -1], [-1, -1, -1])]
    rows = torch.arange(batch * 3).view(batch, 3)
    uniform, final = torch.rand(batch, 3, generator=generator), torch.rand(batch, generator=generator)
    probs = torch.stack([first.expand(batch, -1), then[one], then[two]], dim=1)
    draft_probs = torch.stack([draft_first.expand(batch, -1), draft_then[one], draft_then[two]], dim=1)
    ids = torch.stack([torch.zeros_like(one), one, two], dim=1)
    args = on(device, ids, rows, *links, probs, uniform, final)
    _, num_accepted, accept_ids = verify(*args, max_depth, draft_probs=draft_probs.to(device))
    return complete(accept_ids.cpu(), num_accepted.cpu(), then), joint(first, then)


def complete(accept_ids: Tensor, num_accepted: Tensor, then: Tensor) -> Tensor:
    """The first two tokens of each output; where it has one only, the target draws the second: [batch, 2]."""
    one = accept_ids[:, 0]
    two = torch.multinomial(then.float()[one], 1, generator=torch.Generator().manual_seed(10))[:, 0]
    if accept_ids.size(1) > 1:
        two = torch.where(num_accepted >= 1, accept_ids[:, 1], two)
    return torch.stack([one, two], dim=1)


def joint(first: Tensor, then: Tensor) -> Tensor:
    first, then = first.double() / first.double().sum(), then.double() / then.double().sum(-1, keepdim=True)
    return first.unsqueeze(1) * then  # [vocab, vocab]


def p_value(tokens: Tensor, exact: Tensor) -> float:
    """Of a chi-square test of pairs of tokens against their exact probabilities; 0 for a pair that cannot be."""
    counts = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2).double()
    wanted = exact.flatten() * tokens.size(0)
    if counts[wanted == 0].any():
        return 0.0
    possible = wanted > 0
    assert wanted[possible].min() > 5
    statistic = ((counts - wanted)[possible] ** 2 / wanted[possible]).sum()
    return float(torch.special.gammaincc((possible.sum().double() - 1) / 2, statistic / 2))


def served(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return call(OP, *args, **kwargs)


# Triton's interpreter would take an hour; the grids of uniform numbers below show the same of its kernel, exactly.
@pytest.mark.parametrize(("device", "implementation"), [place for place in places(OP) if not interpreted(*place)])
@pytest.mark.parametrize("outputs", [tree_outputs, chain_outputs])
@pytest.mark.parametrize(("max_depth", "dtype"), [(2, torch.float32), (1, torch.float32), (0, torch.float32),
                                                  (2, torch.bfloat16), (2, torch.float16)])
def test_output_distribution(one_thread: None, device: str, implementation: str, outputs: Any, max_depth: int,
                             dtype: torch.dtype) -> None:
    with forced(implementation):
        assert p_value(*outputs(served, device, 40_000, max_depth, dtype)) > 1e-3


def test_a_broken_rule_fails_the_test(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test finds each of the usual mistakes."""
    in_turn, sampled = reference_module._try_in_turn, reference_module._try_sampled

    def no_removal(p: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
        return in_turn(p, tokens, u, can_try)[0], p

    def no_renormalising(p: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
        mass = reference_module._probability(p, tokens)
        return can_try & (u < mass), in_turn(p, tokens, u, can_try)[1]

    def accepts_zero(p: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
        accept, rest = in_turn(p, tokens, u, can_try)
        return accept | (can_try & (u < 1e-3)), rest

    def draws_from_p(p: Tensor, q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return sampled(p, q, *rest)[0], p

    def accepts_by_p(p: Tensor, q: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
        return can_try & (u < reference_module._probability(p, tokens)), sampled(p, q, tokens, u, can_try)[1]

    for outputs, name, broken in (
        (tree_outputs, "_try_in_turn", no_removal),
        (tree_outputs, "_try_in_turn", no_renormalising),
        (tree_outputs, "_try_in_turn", accepts_zero),
        (chain_outputs, "_try_sampled", draws_from_p),
        (chain_outputs, "_try_sampled", accepts_by_p),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(reference_module, name, broken)
            assert p_value(*outputs(reference_module.verify_sample, "cpu", 40_000, 2)) < 1e-9, broken.__name__
        assert p_value(*outputs(reference_module.verify_sample, "cpu", 40_000, 2)) > 1e-3
