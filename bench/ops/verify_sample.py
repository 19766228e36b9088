"""verify_sample: how much of a drafted tree survives exact rejection sampling."""

from __future__ import annotations

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes
from .verify_greedy import drafted

CHECK = "exact"
pytorch = None  # engines walk the tree in kernels of their own


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    ids, links = drafted(case, config, inputs)
    probs = inputs.uniform(ids.numel(), config.vocab)
    probs /= probs.sum(-1, keepdim=True)
    return Call((ids, *links, probs, inputs.uniform(*ids.shape), inputs.uniform(ids.size(0)), case.num_steps))


def moved(call: Call) -> int:
    ids, *links, probs, uniform, final, depth = call.args
    last = ids.size(0) * probs.size(1) * probs.element_size()  # the row at which the walk ends, once
    return nbytes(ids, *links, uniform, final) + last + ids.size(0) * (16 * (depth + 1) + 8)


def flops(call: Call) -> int:
    return call.args[0].size(0) * call.args[4].size(1)
