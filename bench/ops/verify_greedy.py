"""verify_greedy: how much of a drafted tree the target's own choices accept."""

from __future__ import annotations

import torch

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes
from .tree_build import make as make_tree

CHECK = "exact"
pytorch = None  # engines walk the tree in kernels of their own


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    ids, links = drafted(case, config, inputs)
    target = inputs.integers(config.vocab, ids.numel())
    target[: ids.numel() : 2] = ids.flatten().roll(-1)[: ids.numel() : 2]  # some are what was drafted
    return Call((ids, *links, target, case.num_steps))


def drafted(case: Case, config: AssistantConfig, inputs: Inputs) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Ids and links of a tree of 16 nodes a request."""
    ids, _, _, _, _, *links = torch.ops.mtp.tree_build(*make_tree(case, config, inputs).args)
    return ids, tuple(links)


def moved(call: Call) -> int:
    *tensors, depth = call.args
    return nbytes(*tensors) + tensors[0].size(0) * (16 * (depth + 1) + 8)


def flops(call: Call) -> int:
    return call.args[0].numel()
