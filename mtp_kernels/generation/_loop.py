"""The rounds: prefill, then draft, verify and commit until every request has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..draft import DraftTree, draft, num_candidates
from ..ops._checks import check_range
from ..weights import AssistantWeights
from ._policy import RoundPolicy
from ._requests import Request
from ._sampling import Sampling
from ._statistics import GenerationStatistics
from ._target import Target
from ._tree import roots, spread

ops = torch.ops.mtp


@dataclass(frozen=True)
class GenerationChunk:
    """What a round gave one request: `token_ids`, of which the first `num_accepted` were drafted."""

    request: int  # row of the batch
    token_ids: list[int]
    num_accepted: int
    num_drafted: int  # depth of the draft; 0 where nothing was drafted
    finish_reason: str  # "" while the request goes on, then "stop" or "length"


@dataclass
class Loop:
    """One generation. The state between two rounds is a seed (token and hidden) a request; KV lies in the target."""

    target: Target
    weights: AssistantWeights
    sampling: Sampling
    num_steps: int
    topk: int
    num_draft_tokens: int | None
    stop_ids: Tensor | None  # [n] int64
    policy: RoundPolicy | None
    emit: Callable[[GenerationChunk], None] | None
    suppress_ids: Tensor | None = None  # [n] int64
    statistics: GenerationStatistics = field(default_factory=GenerationStatistics)

    def run(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        active, seed_ids, seed_state = self._prefill(requests)
        while active:
            active, seed_ids, seed_state = self._round(active, seed_ids, seed_state)

    def _prefill(self, requests: Sequence[Request]) -> tuple[list[Request], Tensor, Tensor]:
        start = self._now()
        logits, hidden = self.target.prefill([r.id for r in requests], [r.prompt for r in requests])
        nothing = torch.zeros(len(requests), dtype=torch.int64, device=self.target.device)
        tree = roots(nothing, nothing)
        accepted = self._accept(requests, tree, logits, 0)
        output_ids, num_output, finished, seed_ids, seed_state = self._commit(accepted, hidden)
        token_ids = [ids[:n] for ids, n in zip(output_ids.tolist(), num_output.tolist())]
        self.statistics.prefill_seconds += self._now() - start
        chunks = self._add(requests, token_ids, finished.tolist(), [0] * len(requests), [0] * len(requests))
        return self._go_on(requests, chunks, seed_ids, seed_state)

    def _round(
        self, active: Sequence[Request], seed_ids: Tensor, seed_state: Tensor
    ) -> tuple[list[Request], Tensor, Tensor]:
        start = self._now()
        tree, depths = self._draft(active, seed_ids, seed_state)
        drafted = self._now()
        logits, hidden = self.target.verify([r.id for r in active], tree)
        verified = self._now()
        accepted = self._accept(active, tree, logits, max(depths))
        output_ids, num_output, finished, seed_ids, seed_state = self._commit(accepted, hidden)
        kept, num_accepted = num_output.tolist(), accepted[1].tolist()
        self._keep(active, accepted[0], kept, tree.draft_ids.size(1))
        committed = self._now()
        token_ids = [ids[:n] for ids, n in zip(output_ids.tolist(), kept)]
        chunks = self._add(active, token_ids, finished.tolist(), num_accepted, depths)
        self._account(chunks, drafted - start, verified - drafted, committed - verified)
        if self.policy is not None:
            ids = [r.id for r in active]
            self.policy.update(ids, depths, num_accepted, drafted - start, verified - drafted)
        return self._go_on(active, chunks, seed_ids, seed_state)

    def _draft(self, active: Sequence[Request], seed_ids: Tensor, seed_state: Tensor) -> tuple[DraftTree, list[int]]:
        """The drafts of a round, and how deep each is. A request that wants one more token only needs none."""
        lengths = torch.tensor([self.target.cache.lengths[r.id] for r in active], device=self.target.device)
        rows = [b for b, r in enumerate(active) if r.drafts and r.remaining > 1]
        steps = self._steps(active, rows)
        if steps == 0 or not rows:
            return roots(seed_ids, lengths), [0] * len(active)
        nodes = self.num_draft_tokens
        if nodes is not None:
            nodes = min(nodes, num_candidates(steps, self.topk) + 1)
        place = torch.tensor(rows, device=self.target.device)
        kv = self.target.kv([active[b].id for b in rows], [layer.layer_type for layer in self.weights.layers])
        # transformers' convention: every draft query has the position of the bonus token, the committed length
        own = lengths[place]
        with torch.no_grad():
            drafted = draft(
                self.weights, kv, seed_ids[place], seed_state[place], own, steps, self.topk, nodes, root_positions=own,
                suppress_ids=self.suppress_ids,
            )
        depth = min(steps, drafted.draft_ids.size(1) - 1)
        depths = [0] * len(active)
        for b in rows:
            depths[b] = depth
        return spread(drafted, rows, seed_ids, lengths), depths

    def _steps(self, active: Sequence[Request], rows: Sequence[int]) -> int:
        if self.policy is None or not rows:
            return self.num_steps
        steps = self.policy.choose(len(active), [active[b].id for b in rows])
        check_range("generate", "policy", steps, 0, why="what choose() gave")
        return min(steps, self.num_steps)

    def _accept(
        self, requests: Sequence[Request], tree: DraftTree, logits: Tensor, max_depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = self.target.device
        seeds = torch.tensor([r.seed for r in requests], device=device)
        rounds = torch.tensor([r.rounds for r in requests], device=device)
        return self.sampling.accept(tree, logits, seeds, rounds, max_depth)

    def _commit(
        self, accepted: tuple[Tensor, Tensor, Tensor], hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return ops.commit(*accepted, hidden, stop_ids=self.stop_ids)

    def _keep(self, active: Sequence[Request], accept_index: Tensor, kept: Sequence[int], num_nodes: int) -> None:
        """Commit the KV of the root and of the tokens before the next seed: as many rows as tokens were emitted."""
        nodes = (accept_index % num_nodes).tolist()
        self.target.cache.keep([r.id for r in active], [path[:n] for path, n in zip(nodes, kept)])

    def _add(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[list[int]],
        finished: Sequence[bool],
        num_accepted: Sequence[int],
        depths: Sequence[int],
    ) -> list[GenerationChunk]:
        chunks = []
        for request, ids, stopped, accepted, depth in zip(requests, token_ids, finished, num_accepted, depths):
            taken = request.add(ids, stopped)
            accepted = min(accepted, len(taken))
            chunks.append(GenerationChunk(request.id, taken, accepted, depth, request.finish_reason))
            if self.emit is not None:
                self.emit(chunks[-1])
        return chunks

    def _account(
        self, chunks: Sequence[GenerationChunk], draft_seconds: float, verify_seconds: float, commit_seconds: float
    ) -> None:
        for one in chunks:
            self.statistics.count(one.num_drafted, one.num_accepted, len(one.token_ids))
        self.statistics.draft_seconds += draft_seconds
        self.statistics.verify_seconds += verify_seconds
        self.statistics.commit_seconds += commit_seconds

    def _go_on(
        self, requests: Sequence[Request], chunks: Sequence[GenerationChunk], seed_ids: Tensor, seed_state: Tensor
    ) -> tuple[list[Request], Tensor, Tensor]:
        """Requests that have ended leave the batch, and their pages are free."""
        for one in chunks:
            if one.finish_reason:
                self.target.cache.release(one.request)
                if self.policy is not None:
                    self.policy.forget(one.request)
        rows = [b for b, one in enumerate(chunks) if not one.finish_reason]
        place = torch.tensor(rows, dtype=torch.int64, device=seed_ids.device)
        return [requests[b] for b in rows], seed_ids[place], seed_state[place]

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()
