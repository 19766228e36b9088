"""Weights for the tests of segments."""

from __future__ import annotations

from dataclasses import replace

from mtp_kernels import AssistantWeights
from mtp_kernels.weights import PRESETS

SMALL = replace(PRESETS["E4B"], backbone=256, vocab=2048 * 32)  # E4B's layers and centroids


def weights_of(model: str) -> AssistantWeights:
    """On the GPU, in bf16."""
    return AssistantWeights.synthetic(SMALL if model == "small" else model, device="cuda")
