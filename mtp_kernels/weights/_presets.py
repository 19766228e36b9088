"""The assistants of Gemma 4's five sizes, and two tiny ones for tests and examples."""

from __future__ import annotations

import torch
from torch import Tensor

from ._config import FULL, SLIDING, AssistantConfig, AttentionConfig
from ._layout import ORDERING, layout


def _preset(
    hidden: int,
    intermediate: int,
    backbone: int,
    num_qo_heads: int,
    kv_heads: tuple[int, int],  # sliding, full
    window: int,
    *,
    centroids: tuple[int, int] = (0, 0),  # all, active
    head_dims: tuple[int, int] = (256, 512),
    vocab: int = 262144,
    layer_types: tuple[str, ...] = (SLIDING, SLIDING, SLIDING, FULL),
    architecture: str = "Gemma4AssistantForCausalLM",
) -> AssistantConfig:
    sliding = AttentionConfig(SLIDING, kv_heads[0], head_dims[0], 1e4, head_dims[0] // 2)
    full = AttentionConfig(FULL, kv_heads[1], head_dims[1], 1e6, head_dims[1] // 8)  # a quarter of the pairs turns
    return AssistantConfig(
        architecture=architecture,
        vocab=vocab,
        hidden=hidden,
        intermediate=intermediate,
        backbone=backbone,
        num_qo_heads=num_qo_heads,
        layer_types=layer_types,
        attention=(sliding, full),
        sliding_window=window,
        num_centroids=centroids[0],
        num_active=centroids[1],
    )


def _tiny(centroids: tuple[int, int]) -> AssistantConfig:
    return _preset(
        32, 48, 40, 4, (2, 1), 8, centroids=centroids, head_dims=(64, 128), vocab=64, layer_types=(SLIDING, FULL)
    )


PRESETS: dict[str, AssistantConfig] = {
    "E2B": _preset(256, 2048, 1536, 4, (1, 1), 512, centroids=(2048, 32)),
    "E4B": _preset(256, 2048, 2560, 4, (2, 2), 512, centroids=(2048, 32)),
    "12B": _preset(1024, 8192, 3840, 16, (8, 1), 1024, architecture="Gemma4UnifiedAssistantForCausalLM"),
    "26B-A4B": _preset(1024, 8192, 2816, 16, (8, 2), 1024),
    "31B": _preset(1024, 8192, 5376, 32, (16, 4), 1024),
    "tiny": _tiny((8, 2)),
    "tiny-dense": _tiny((0, 0)),
}


def random_tensors(
    config: AssistantConfig, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Weights under which activations keep their size: matrices with variance 1 / fan-in, norms and scalars near 1.

    Made on the device; one seed gives different values on different kinds of device. On meta there are none.
    """
    tensors = {}
    for name, shape in layout(config).items():
        if name == ORDERING:
            order = torch.randperm(config.vocab, generator=generator, device=device)
            tensors[name] = order
            continue
        mean, std = (0.0, shape[1] ** -0.5) if len(shape) == 2 else (1.0, 0.1)
        tensors[name] = torch.empty(shape, dtype=dtype, device=device).normal_(mean, std, generator=generator)
    return tensors
