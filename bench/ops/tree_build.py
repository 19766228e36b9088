"""tree_build: the draft of a round of four steps, from all its candidates."""

from __future__ import annotations

import torch

from ...draft import num_candidates
from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "exact"
TOPK, NODES = 4, 16
pytorch = None  # engines build the tree in kernels of their own


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    topk = case.rows if case.rows > 1 else TOPK
    count = num_candidates(case.num_steps, topk)
    ids = inputs.integers(config.vocab, case.batch, topk, topk)
    logprobs = -inputs.uniform(case.batch, topk, topk).sort(-1).values * 8
    first = (logprobs[:, :1], ids[:, :1])
    all_scores, all_ids, all_parents = [], [], []
    scores = frontier = None
    offset = 0
    for step in range(case.num_steps):
        one = (logprobs, ids) if step else first
        _, _, scores, frontier, cand_scores, parents = torch.ops.mtp.tree_expand(
            *one, offset, scores=scores, frontier=frontier
        )
        all_scores.append(cand_scores)
        all_ids.append(one[1].flatten(1))
        all_parents.append(parents)
        offset += one[1][0].numel()
    positions = torch.full((case.batch,), case.context, device=inputs.device)
    nodes = min(NODES, count + 1)
    joined = (torch.cat(all_scores, 1), torch.cat(all_ids, 1), torch.cat(all_parents, 1))
    return Call((inputs.integers(config.vocab, case.batch), *joined, positions, nodes))


def moved(call: Call) -> int:
    *tensors, nodes = call.args
    return nbytes(*tensors) + tensors[0].size(0) * nodes * (7 * 8 + nodes)


def flops(call: Call) -> int:
    return call.args[1].numel()
