"""centroid_logits: the candidates of the centroid head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...weights import AssistantConfig
from ..case import Call, Case
from ..inputs import Inputs, nbytes

CHECK = "candidates"
DRAWN = 16  # rows drawn for each one kept


def variants(config: AssistantConfig) -> tuple[str, ...]:
    return ("",) if config.head == "centroid" else ()


def make(case: Case, config: AssistantConfig, inputs: Inputs) -> Call:
    return Call(head_inputs(case, config, inputs))


def head_inputs(case: Case, config: AssistantConfig, inputs: Inputs) -> tuple[Any, ...]:
    """(normed, centroid_weight, token_ordering, lm_head_weight, num_active).

    The head is shared by all sets: each reads 32 of 2048 centroids' rows, other ones every time. Of the rows drawn,
    those are kept whose last active centroid leads the next one by most: with a tie there, two right implementations
    pick different candidates.
    """
    head = inputs.shared("head", lambda: inputs.matrix(config.vocab, config.hidden))
    ordering = inputs.shared("ordering", lambda: inputs.permutation(config.vocab))
    centroids = inputs.matrix(config.num_centroids, config.hidden)
    rows, active = case.batch * case.rows, config.num_active
    drawn = inputs.normal(DRAWN * rows, config.hidden)
    if active < config.num_centroids:
        scores = F.linear(drawn.float(), centroids.float()).topk(active + 1, -1).values
        drawn = drawn[(scores[:, active - 1] - scores[:, active]).topk(rows).indices]
    normed = drawn[:rows].view(case.batch, case.rows, config.hidden)
    return normed, centroids, ordering, head, active


def moved(call: Call) -> int:
    normed, centroids, _, head, num_active = call.args
    rows = normed.numel() // normed.size(-1)
    candidates = rows * num_active * (head.size(0) // centroids.size(0))
    read = min(candidates, head.size(0))
    return nbytes(normed, centroids) + read * (head.size(1) * head.element_size() + 8) + candidates * 12


def flops(call: Call) -> int:
    normed, centroids, _, head, num_active = call.args
    return 2 * normed.numel() * (centroids.size(0) + num_active * (head.size(0) // centroids.size(0)))


def pytorch(
    normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, lm_head_weight: Tensor, num_active: int
) -> tuple[Tensor, Tensor]:
    logits, ids = pytorch_candidates(normed, centroid_weight, token_ordering, lm_head_weight, num_active)
    return logits.float(), ids


def pytorch_candidates(
    normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, lm_head_weight: Tensor, num_active: int,
    centroid_ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logits and ids of the candidates in the dtype of the head, gathered as engines gather them."""
    num_centroids = centroid_weight.size(0)
    active = torch.topk(F.linear(normed, centroid_weight), num_active, -1).indices
    ids = token_ordering.view(num_centroids, -1)[active].flatten(-2)  # [..., candidates]
    if centroid_ordered:
        rows = lm_head_weight.unflatten(0, (num_centroids, -1))[active].flatten(-3, -2)
    else:
        rows = lm_head_weight[ids]
    return torch.einsum("...d,...sd->...s", normed, rows), ids
