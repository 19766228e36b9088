"""pre_project: embedding of the drafted token beside the state, projected to the drafter's width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...weights import AssistantConfig
from ...weights._embedding import rounded_scale
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "floats"


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",)


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    width = config.backbone
    embed = inputs.shared("embed", lambda: inputs.table(config.vocab, width))
    ids = inputs.integers(config.vocab, case.batch, case.rows)
    state = inputs.normal(case.batch, case.rows, width)
    weight = inputs.matrix(config.hidden, 2 * width)
    return Call((ids, embed, rounded_scale(width, inputs.dtype), state, weight))


def moved(call: Call) -> int:
    ids, _, _, state, weight = call.args
    out = ids.numel() * weight.size(0) * weight.element_size()
    return nbytes(ids, state, state, weight) + out  # the embedding's rows are as large as the state's


def flops(call: Call) -> int:
    ids, _, _, _, weight = call.args
    return 2 * ids.numel() * weight.numel()


def pytorch(token_ids: Tensor, embed_weight: Tensor, embed_scale: float, state: Tensor, weight: Tensor) -> Tensor:
    embedded = F.embedding(token_ids, embed_weight) * embed_scale
    return F.linear(torch.cat([embedded, state], -1), weight)
