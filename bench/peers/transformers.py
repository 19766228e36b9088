"""transformers' own assistant, eager, on the weights that our step has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_kernels.weights import AssistantWeights
from mtp_kernels.weights._config import FULL, SLIDING, AssistantConfig

DenseKV = Mapping[str, tuple[Tensor, Tensor]]  # layer type -> K, V [batch, num_kv_heads, length, head_dim]
Step = Callable[[Tensor, Tensor, Tensor, DenseKV], tuple[Tensor, Tensor]]


def step(weights: AssistantWeights) -> Step:
    """step(token_ids [batch], state [batch, backbone], positions [batch], kv) -> (ids [batch], state), greedy.

    What generate() does around the assistant is here too: embed with the target's embedding, scale, concatenate.
    All requests have the same length. The sliding layers may be given all keys: transformers masks all but the last
    W + 1. It reads values on the host, so no CUDA graph can hold it.
    """
    assistant = make_assistant(weights)

    @torch.no_grad()
    def run(token_ids: Tensor, state: Tensor, positions: Tensor, kv: DenseKV) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(token_ids, weights.embed_weight) * weights.embed_scale
        out = assistant(
            inputs_embeds=torch.cat([embedded, state], -1).unsqueeze(1),  # [batch, 1, 2 * backbone]
            position_ids=positions.long().unsqueeze(1),
            shared_kv_states=dict(kv),
        )
        return out.logits[:, 0].argmax(-1), out.last_hidden_state[:, 0]

    return run


def make_assistant(weights: AssistantWeights) -> Any:
    """transformers' module that shares the memory of `weights`, in eval mode, without gradients."""
    import transformers

    config = weights.config
    before = torch.get_default_dtype()
    torch.set_default_dtype(weights.dtype)  # as from_pretrained does: RoPE's buffers stay fp32
    try:
        with torch.device(weights.device):
            assistant = getattr(transformers, config.architecture)(hf_config(config))
    finally:
        torch.set_default_dtype(before)
    missing, unexpected = assistant.load_state_dict(state_dict(weights), strict=False, assign=True)
    if missing or unexpected:
        raise RuntimeError(f"transformers' assistant has other tensors: missing {missing}, unexpected {unexpected}")
    return assistant.eval().requires_grad_(False)


def state_dict(weights: AssistantWeights) -> dict[str, Tensor]:
    """The weights by transformers' names."""
    head = weights.lm_head
    if weights.centroid_ordered and weights.token_ordering is not None:
        head = torch.empty_like(head).index_copy_(0, weights.token_ordering, head)
    tensors = {
        "pre_projection.weight": weights.pre_projection,
        "post_projection.weight": weights.post_projection,
        "model.norm.weight": weights.norm,
        "lm_head.weight": head,
        "model.embed_tokens.weight": head,  # tied
    }
    if weights.centroids is not None and weights.token_ordering is not None:
        tensors["masked_embedding.centroids.weight"] = weights.centroids
        tensors["masked_embedding.token_ordering"] = weights.token_ordering
    for i, layer in enumerate(weights.layers):
        gate, up = layer.gate_up.chunk(2)
        of_layer = {
            "input_layernorm.weight": layer.input_norm,
            "self_attn.q_proj.weight": layer.q_proj,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.o_proj.weight": layer.o_proj,
            "post_attention_layernorm.weight": layer.post_attention_norm,
            "pre_feedforward_layernorm.weight": layer.pre_feedforward_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
            "post_feedforward_layernorm.weight": layer.post_feedforward_norm,
            "layer_scalar": layer.layer_scalar,
        }
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in of_layer.items()}
    return tensors


def hf_config(config: AssistantConfig) -> Any:
    """transformers' config of these sizes."""
    import transformers

    unified = "Unified" in config.architecture
    prefix = "Gemma4Unified" if unified else "Gemma4"
    text_class, whole_class = (getattr(transformers, f"{prefix}{kind}Config") for kind in ("Text", "Assistant"))
    without: dict[str, Any] = {} if unified else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    sliding, full = config.attention_of(SLIDING), config.attention_of(FULL)
    text = text_class(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=len(config.layer_types),
        num_kv_shared_layers=len(config.layer_types),
        layer_types=list(config.layer_types),
        num_attention_heads=config.num_qo_heads,
        num_key_value_heads=sliding.num_kv_heads,
        num_global_key_value_heads=full.num_kv_heads,
        head_dim=sliding.head_dim,
        global_head_dim=full.head_dim,
        attention_k_eq_v=True,  # gives full layers their own number of KV heads
        sliding_window=config.sliding_window,
        rms_norm_eps=config.norm_eps,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": sliding.rope_theta},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": full.rope_theta,
                "partial_rotary_factor": 2 * full.num_pairs / full.head_dim,
            },
        },
        **without,
    )
    return whole_class(
        text_config=text,
        backbone_hidden_size=config.backbone,
        use_ordered_embeddings=config.head == "centroid",
        num_centroids=config.num_centroids or 2048,
        centroid_intermediate_top_k=config.num_active or 32,
    )
