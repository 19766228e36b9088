"""Serving in simulated time: recorded acceptance, modelled seconds, and a DraftPolicy beside every fixed depth.

The acceptance is the example pair's: `examples/record_acceptance.py` drafted a chain from every position of its
target's continuations, so a generation can be replayed with any depth in every round. The batch is always full: a
request that ends makes room for the next of a shuffled queue. The seconds come from a CostModel; a policy sees what
generate() would see: counts, and seconds with noise. It is never given the cost model or the record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..demo.pair import HEADS, pair_directory
from ..policy import CostModel, DraftPolicy

Array = NDArray[np.float64]
Stream = NDArray[np.int64]  # of one request: accepted tokens of a chain of MAX_STEPS from each position

MAX_STEPS = 8
BANDWIDTH, FLOPS = 4.29e12, 7.83e14  # bytes and operations a second: the H200 of bench/results/h200/sweep.jsonl
# (batch, seconds) of a draft step by this library, from that record: contexts of 1024, 8192 and 4096 tokens.
DRAFT_STEP = {
    "E4B": ((1, 121.4e-6), (8, 244.1e-6), (64, 665.2e-6)),
    "31B": ((1, 405.4e-6), (8, 687.1e-6), (64, 2255.5e-6)),
    "26B-A4B": ((1, 364.0e-6), (8, 513.2e-6), (64, 1441.2e-6)),
}
NOISE, OUTLIERS, OUTLIER = 0.05, 0.005, 10.0  # of measured seconds: their spread, and how many are how much too long


def dense_target(parameters: float, draft_step: Sequence[tuple[float, float]]) -> CostModel:
    """A bf16 target whose forward reads its weights, or multiplies with them, whichever takes longer."""
    read, token = 2 * parameters / BANDWIDTH, 2 * parameters / FLOPS
    knee = read / token
    return CostModel(draft_step=draft_step, verify=[(1, read), (knee, read), (2 * knee, 2 * read)])


def expert_target(
    shared: float, experts: float, num_experts: int, chosen: int, draft_step: Sequence[tuple[float, float]]
) -> CostModel:
    """A bf16 mixture of experts: every token brings `chosen` experts along, so the bytes grow from the first on."""
    points = []
    for tokens in (2**i for i in range(12)):
        touched = 1 - (1 - chosen / num_experts) ** tokens
        read = 2 * (shared + experts * touched) / BANDWIDTH
        points.append((tokens, max(read, 2 * tokens * (shared + experts * chosen / num_experts) / FLOPS)))
    return CostModel(draft_step=draft_step, verify=points)


COSTS = {
    "E4B": dense_target(4e9, DRAFT_STEP["E4B"]),
    "31B": dense_target(31e9, DRAFT_STEP["31B"]),
    "26B-A4B": expert_target(3e9, 23e9, 128, 8, DRAFT_STEP["26B-A4B"]),
    # Multiplying is what takes time from a few tokens on, as on a CPU: drafting soon costs more than it brings.
    "compute-bound": CostModel(
        draft_step=[(1, 2e-3), (16, 8e-3), (128, 60e-3)], verify=[(1, 50e-3), (8, 55e-3), (64, 400e-3)]
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    tokens: int
    seconds: float  # without the noise that the policy saw
    rounds: list[int]  # of each depth

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds


def recorded(head: str = HEADS[0]) -> list[Stream]:
    """The example pair's requests."""
    record = json.loads((pair_directory() / "accepted_lengths.json").read_text(encoding="utf-8"))
    return [_digits(text) for text in record["accepted"][head]]


def independent(rates: Sequence[float], requests: int, length: int, seed: int) -> list[Stream]:
    """Requests whose chains accept their tokens at these rates by position, each chain by itself."""
    random = np.random.default_rng(seed).random((requests, length, len(rates)))
    return list((random < np.array(rates)).cumprod(-1).sum(-1))


REGIMES = ("pair", "falling", "poor", "differing", "changing")


def regimes() -> dict[str, list[list[Stream]]]:
    """What the acceptance can be like; where there are several lists, each in turn holds for a part of the tokens."""
    pair = recorded()
    poor = independent([0.1] * MAX_STEPS, 40, 128, seed=1)
    return {
        "pair": [pair],
        "falling": [independent([0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5, 0.5], 40, 128, seed=2)],
        "poor": [poor],
        "differing": [independent([0.95] * 8, 20, 128, seed=3) + independent([0.25] * 8, 20, 128, seed=4)],
        "changing": [pair, poor, pair],
    }


class World:
    """A full batch of requests, whose text is what the record says."""

    def __init__(self, phases: Sequence[Sequence[Stream]], batch: int, tokens: int, seed: int) -> None:
        self._phases, self._batch, self._budget = phases, batch, tokens
        self._random = np.random.default_rng(seed)
        self.made, self._next_id, self._phase = 0, 0, -1
        self.ids: list[int] = []
        self.ended: list[int] = []  # in the last round
        self._enter(0)

    @property
    def done(self) -> bool:
        return self.made >= self._budget

    def round(self, depth: int) -> NDArray[np.int64]:
        """Accepted tokens of each request, drafted `depth` deep."""
        accepted = np.minimum(self._table[self._request, self._place], depth)
        self._place += accepted + 1
        self.made += int(accepted.sum()) + self._batch
        self.ended = []
        for i in (self._place >= self._lengths[self._request]).nonzero()[0].tolist():
            self.ended.append(self.ids[i])
            self._request[i], self._place[i], self.ids[i] = self._take(), 0, self._new_id()
        self._enter(min(self.made * len(self._phases) // self._budget, len(self._phases) - 1))
        return accepted

    def _enter(self, phase: int) -> None:
        """The requests of another phase, each somewhere in its text; their ids stay."""
        if phase == self._phase:
            return
        self._phase = phase
        streams = self._phases[phase]
        self._lengths = np.array([len(s) for s in streams])
        self._table = np.zeros((len(streams), self._lengths.max()), dtype=np.int64)
        for i, stream in enumerate(streams):
            self._table[i, : len(stream)] = stream
        self._queue: list[int] = []
        self._request = np.array([self._take() for _ in range(self._batch)])
        self._place = (self._random.random(self._batch) * self._lengths[self._request]).astype(np.int64)
        self.ids = self.ids or [self._new_id() for _ in range(self._batch)]

    def _take(self) -> int:
        if not self._queue:
            self._queue = self._random.permutation(len(self._lengths)).tolist()
        return self._queue.pop()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def run_fixed(
    phases: Sequence[Sequence[Stream]], batch: int, tokens: int, depth: int, seed: int = 0
) -> tuple[int, int]:
    """(tokens, rounds) of the same depth in every round, at least `tokens` of them."""
    world, rounds = World(phases, batch, tokens, seed), 0
    while not world.done:
        world.round(depth)
        rounds += 1
    return world.made, rounds


def run_policy(
    policy: DraftPolicy, phases: Sequence[Sequence[Stream]], costs: CostModel, batch: int, tokens: int, seed: int = 0
) -> Outcome:
    """The policy's choice in every round; it learns counts and noisy seconds, and nothing else."""
    world, noise = World(phases, batch, tokens, seed), np.random.default_rng(seed + 1)
    rounds, total = [0] * (policy.max_steps + 1), 0.0
    while not world.done:
        ids = list(world.ids)
        depth = policy.choose(batch, ids)
        accepted = world.round(depth)
        draft, verify = costs.draft_seconds(batch, depth), costs.verify_seconds(batch * (depth + 1))
        rounds[depth] += 1
        total += draft + verify
        factors = np.exp(noise.normal(0, NOISE, 2)) * (OUTLIER if noise.random() < OUTLIERS else 1.0)
        policy.update(ids, [depth] * batch, accepted.tolist(), draft * float(factors[0]), verify * float(factors[1]))
        for request in world.ended:
            policy.forget(request)
    return Outcome(world.made, total, rounds)


def _digits(text: str) -> Stream:
    return np.array([int(c) for c in text])
