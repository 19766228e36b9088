"""One layer's weights, and all of them from tensors with transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ._config import AssistantConfig


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. Matrices are [out, in]; norm weights are plain w, not 1 + w."""

    layer_type: str  # which of the target's caches it reads: "sliding_attention" or "full_attention"
    num_qo_heads: int
    head_dim: int
    input_norm: Tensor  # [hidden]
    q_proj: Tensor  # [num_qo_heads * head_dim, hidden]
    q_norm: Tensor  # [head_dim]
    rope_inv_freq: Tensor  # [num_pairs] fp32, of the pairs that turn
    o_proj: Tensor  # [hidden, num_qo_heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    pre_feedforward_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], gate first
    down: Tensor  # [hidden, intermediate]
    post_feedforward_norm: Tensor  # [hidden]
    layer_scalar: Tensor  # [1]
    sm_scale: float = 1.0  # Gemma 4 normalises queries and keys instead


def make_layers(
    config: AssistantConfig, tensors: Mapping[str, Tensor], device: torch.device
) -> tuple[LayerWeights, ...]:
    """Every layer, sharing the tensors' memory but for gate and up, which are merged."""
    inv_freq = {a.layer_type: a.inv_freq(device) for a in config.attention}
    layers = []
    for i, layer_type in enumerate(config.layer_types):
        of = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in tensors.items()}
        layers.append(
            LayerWeights(
                layer_type=layer_type,
                num_qo_heads=config.num_qo_heads,
                head_dim=config.attention_of(layer_type).head_dim,
                input_norm=of["input_layernorm.weight"],
                q_proj=of["self_attn.q_proj.weight"],
                q_norm=of["self_attn.q_norm.weight"],
                rope_inv_freq=inv_freq[layer_type],
                o_proj=of["self_attn.o_proj.weight"],
                post_attention_norm=of["post_attention_layernorm.weight"],
                pre_feedforward_norm=of["pre_feedforward_layernorm.weight"],
                gate_up=torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]),
                down=of["mlp.down_proj.weight"],
                post_feedforward_norm=of["post_feedforward_layernorm.weight"],
                layer_scalar=of["layer_scalar"],
            )
        )
    return tuple(layers)
