"""commit: what a round adds to the output, and the seed of the next one."""

from __future__ import annotations

import torch

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes
from .verify_greedy import make as make_verify

CHECK = "exact"
pytorch = None  # engines do this on the host


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    verify = make_verify(case, config, inputs)
    accepted = torch.ops.mtp.verify_greedy(*verify.args)
    hidden = inputs.normal(verify.args[0].numel(), config.backbone)
    return Call((*accepted, hidden), {"stop_ids": torch.tensor([1], device=inputs.device)})


def moved(call: Call) -> int:
    index, count, ids, hidden = call.args
    row = hidden.size(1) * hidden.element_size()
    return nbytes(index, count, ids, ids, call.kwargs["stop_ids"]) + index.size(0) * (2 * row + 17)


def flops(call: Call) -> int:
    return call.args[0].numel()
