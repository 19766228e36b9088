"""An assistant's weights: from a checkpoint, from a transformers module, or random ones of a real size."""

from __future__ import annotations

from ._config import AssistantConfig, AttentionConfig
from ._errors import CheckpointError
from ._layers import LayerWeights
from ._presets import PRESETS
from ._weights import AssistantWeights

__all__ = ["PRESETS", "AssistantConfig", "AssistantWeights", "AttentionConfig", "CheckpointError", "LayerWeights"]
