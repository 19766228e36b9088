"""The target's input embedding, which an assistant reads beside its own weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._checks import check_float, check_last_contiguous, check_shape, require
from ._config import AssistantConfig


def check_embedding(where: str, config: AssistantConfig, embed_weight: Tensor) -> None:
    """It has the target's width: an embedding of the assistant's own would draft badly without an error."""
    name, got = "embed_weight", type(embed_weight).__name__
    require(isinstance(embed_weight, Tensor), where, name, "a tensor, the target's embedding", got)
    why = f"the target's: backbone_hidden_size is {config.backbone}, the assistant's own width {config.hidden}"
    check_shape(where, name, embed_weight, (config.vocab, config.backbone), why)
    check_float(where, name, embed_weight)
    check_last_contiguous(where, embed_weight=embed_weight)


def rounded_scale(backbone: int, dtype: torch.dtype) -> float:
    """sqrt(backbone) as an embedding of that dtype is multiplied by it.

    >>> rounded_scale(2560, torch.float32), rounded_scale(2560, torch.bfloat16)
    (50.59644317626953, 50.5)
    """
    return float(torch.tensor(backbone**0.5, dtype=torch.float32, device="cpu").to(dtype))
