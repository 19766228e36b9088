"""How the target chooses: greedily, or by exact rejection from its softmax at a temperature, cut by top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..draft import DraftTree
from ..reference._philox import philox

ops = torch.ops.mtp


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def accept(
        self, tree: DraftTree, logits: Tensor, seeds: Tensor, rounds: Tensor, max_depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Walk the draft: (accept_index, num_accepted, accept_ids) of `verify_greedy` or `verify_sample`.

        Args:
            logits: [batch * N, vocab] of the target behind every node.
            seeds: [batch] int64, and rounds: [batch] int64, the number of the round within each request. All random
                numbers of a request follow from these two, whatever it is batched with.
        """
        links = (tree.draft_ids, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling)
        if self.temperature == 0:
            return ops.verify_greedy(*links, logits.argmax(-1), max_depth)
        random = uniform(seeds, rounds, tree.draft_ids.size(1))
        # The root is never tried, so its number is free to draw the last token with.
        final = random[:, 0].contiguous()
        return ops.verify_sample(*links, self.probs(logits), random, final, max_depth)

    def probs(self, logits: Tensor) -> Tensor:
        """softmax(logits / temperature) [.., vocab] in fp32, within the top_k best tokens, then within the smallest
        set of tokens whose probabilities reach top_p: transformers' order and meaning."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.size(-1):
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(dim=-1, stable=True)  # ascending
            cut = ordered.cumsum(-1) <= 1 - self.top_p
            cut[..., -1] = False  # the best always stays
            probs = probs.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), 0.0)
        return probs / probs.sum(-1, keepdim=True)


def uniform(seeds: Tensor, rounds: Tensor, count: int) -> Tensor:
    """[batch, count] fp32 in [0, 1), steps of 2^-24: a function of (seed, round, column) alone."""
    column = torch.arange(count, device=seeds.device)
    seeds, rounds = seeds.unsqueeze(1), rounds.unsqueeze(1)  # [batch, 1]
    key = (seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF)
    word = philox((column, 0, rounds & 0xFFFFFFFF, (rounds >> 32) & 0xFFFFFFFF), key)[0]
    assert isinstance(word, Tensor)
    return (word >> 8).to(torch.float32) * 2.0**-24

