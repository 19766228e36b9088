"""generate() with a temperature: what it says has the target's distribution, and the usual mistakes are found."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from generation_cases import VOCAB, tiny_pair
from harness import forced
from sampling_cases import DEPTH, PROMPT, exact, p_values
from torch import Tensor

from mtp_kernels import generate
from mtp_kernels.generation import _sampling
from mtp_kernels.generation._sampling import Sampling, uniform

reference_module = importlib.import_module("mtp_kernels.reference.verify_sample")
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_steps": 3},
    "tree": {"num_steps": 2, "topk": 4, "num_draft_tokens": 8},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def draws(shape: str, count: int, seed: int, **sampling: Any) -> tuple[Tensor, float]:
    """`count` generations of DEPTH tokens [count, DEPTH], and the share of rounds that accepted a draft token."""
    pair, rows, accepted = tiny_pair("dense"), [], 0.0
    size = 2500
    for start in range(0, count, size):
        prompts = torch.tensor(PROMPT).expand(size, -1)
        seeds = range(seed + start, seed + start + size)
        out = generate(
            pair.target, pair.weights, prompts, max_new_tokens=DEPTH, seed=seeds, **SHAPES[shape], **sampling
        )
        rows.append(torch.tensor(out.token_ids))
        accepted += out.statistics.accepted_per_position[0] / (count / size)
    return torch.cat(rows), accepted


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        ("chain", {"temperature": 1.0}),
        ("tree", {"temperature": 0.6}),
    ],
)
def test_distribution_is_the_targets(shape: str, sampling: dict[str, Any]) -> None:
    tokens, accepted = draws(shape, 10_000, 10_000_000, **sampling)
    assert accepted > 0.2  # the rule is put to use
    assert min(p_values(tokens, exact("dense", **sampling))) > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_top_k_and_top_p(shape: str) -> None:
    """Two draws in three fall outside what is cut, so nothing cut may ever come."""
    sampling = {"temperature": 1.2, "top_k": 6, "top_p": 0.7}
    probs = exact("dense", **sampling)
    assert (probs == 0).float().mean() > 0.5
    tokens, _ = draws(shape, 2_500, 20_000_000, **sampling)
    assert min(p_values(tokens, probs)) > 1e-3


def test_a_broken_rule_fails_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that accept too much, forget what was refused, or draw the same numbers again."""
    in_turn = reference_module._try_in_turn

    def keeps_refused(p: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
        return in_turn(p, tokens, u, can_try)[0], p

    def accepts_too_much(p: Tensor, tokens: Tensor, u: Tensor, can_try: Tensor) -> tuple[Tensor, Tensor]:
        return in_turn(p, tokens, u * 0.7, can_try)

    def same_every_round(seeds: Tensor, rounds: Tensor, count: int) -> Tensor:
        return uniform(seeds, torch.zeros_like(rounds), count)

    probs = exact("dense", 1.0)
    with forced("reference"):
        for module, name, broken in (
            (reference_module, "_try_in_turn", keeps_refused),
            (reference_module, "_try_in_turn", accepts_too_much),
            (_sampling, "uniform", same_every_round),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, broken)
                tokens, _ = draws("tree", 2_500, 30_000_000, temperature=1.0)
                assert min(p_values(tokens, probs)) < 1e-9, broken.__name__
        tokens, _ = draws("tree", 2_500, 30_000_000, temperature=1.0)
        assert min(p_values(tokens, probs)) > 1e-3


def test_probabilities_are_transformers_own() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.3, 5, 1.0), (2.0, 0, 0.8), (1.3, 7, 0.5), (1.0, 1, 0.01)):
        wanted = logits / temperature
        if top_k:
            wanted = TopKLogitsWarper(top_k)(None, wanted)
        if top_p < 1:
            wanted = TopPLogitsWarper(top_p)(None, wanted)
        got = Sampling(temperature, top_k, top_p).probs(logits)
        torch.testing.assert_close(got, wanted.softmax(-1), rtol=1e-5, atol=1e-7)
        assert torch.equal(got > 0, wanted > -torch.inf)


def test_uniform_numbers_follow_from_seed_round_and_column() -> None:
    seeds, rounds = torch.tensor([5, -5, 2**40, 5]), torch.tensor([0, 0, 3, 1])
    numbers = uniform(seeds, rounds, 6)
    assert numbers.dtype == torch.float32 and ((numbers >= 0) & (numbers < 1)).all()
    assert torch.equal(uniform(seeds[1:3], rounds[1:3], 4), numbers[1:3, :4])
    many = uniform(torch.arange(2000), torch.zeros(2000, dtype=torch.int64), 50).flatten()
    assert many.unique().numel() > 99_000  # of 100 000 draws from 2^24 values, 300 fall on one already drawn
    counts = torch.histc(many, 20, 0.0, 1.0).double()
    assert float(torch.special.gammaincc(torch.tensor(9.5).double(), ((counts - 5000) ** 2 / 5000).sum() / 2)) > 1e-3


def test_same_seed_same_text_whatever_the_neighbours() -> None:
    pair, generator = tiny_pair(), torch.Generator().manual_seed(4)
    prompts = torch.randint(VOCAB, (6, 12), generator=generator)
    seeds = [3, 1, 4, 1, 5, 9]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, **SHAPES["tree"]}
    together = generate(pair.target, pair.weights, prompts, seed=seeds, **options)
    order = [4, 0, 5]
    some = generate(pair.target, pair.weights, prompts[order], seed=[seeds[b] for b in order], **options)
    assert some.token_ids == [together.token_ids[b] for b in order]
    one = generate(pair.target, pair.weights, prompts[2:3], seed=4, **options)
    assert one.token_ids == [together.token_ids[2]]
    # one seed for all is not one draw for all, and its parts can be had alone
    same = generate(pair.target, pair.weights, prompts[:1].expand(4, -1), seed=7, **options)
    assert len({tuple(ids) for ids in same.token_ids}) > 1
    third = generate(pair.target, pair.weights, prompts[:1], seed=7 + (2 << 32), **options)
    assert third.token_ids[0] == same.token_ids[2]


def test_a_greedy_neighbourhood_of_zero() -> None:
    """A tiny temperature says what temperature 0 says, by the other rule."""
    pair = tiny_pair()
    prompts = torch.randint(VOCAB, (5, 10), generator=torch.Generator().manual_seed(6))
    for shape in SHAPES.values():
        greedy = generate(pair.target, pair.weights, prompts, max_new_tokens=10, **shape)
        cold = generate(pair.target, pair.weights, prompts, max_new_tokens=10, temperature=1e-6, **shape)
        assert cold.token_ids == greedy.token_ids
