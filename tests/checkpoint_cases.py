"""A checkpoint of an assistant written without transformers, and ways to change it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_bits
from safetensors.torch import save_file
from torch import Tensor

from mtp_kernels import AssistantWeights, CheckpointError
from mtp_kernels.weights import AssistantConfig, AttentionConfig

Config = dict[str, Any]
Tensors = dict[str, Tensor]

# As transformers 5.17 and 5.24 write it.
CONFIG: Config = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 6,
    "centroid_intermediate_top_k": 2,
    "dtype": "float32",
    "model_type": "gemma4_assistant",
    "num_centroids": 4,
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "head_dim": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 10,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 14,
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "gemma4_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "per_layer_config": {"1": {"head_dim": 8, "num_key_value_heads": 1}},
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 5,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "vocab_size": 12,
    },
    "tie_word_embeddings": True,
    "use_ordered_embeddings": True,
}
PARSED = AssistantConfig(
    architecture="Gemma4AssistantForCausalLM",
    vocab=12,
    hidden=10,
    intermediate=14,
    backbone=6,
    num_qo_heads=4,
    layer_types=("sliding_attention", "full_attention"),
    attention=(
        AttentionConfig("sliding_attention", 2, 4, 1e4, 2),
        AttentionConfig("full_attention", 1, 8, 1e6, 1),
    ),
    sliding_window=5,
    num_centroids=4,
    num_active=2,
)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
ORDERING = "masked_embedding.token_ordering"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoint_tensors() -> Tensors:
    """What CONFIG's checkpoint holds, under the names that transformers uses."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (10, 12),
        "post_projection.weight": (6, 10),
        "model.norm.weight": (10,),
        EMBEDDING: (12, 10),
        "masked_embedding.centroids.weight": (4, 10),
    }
    for i, dim in enumerate((4, 8)):
        of_layer = {
            "input_layernorm.weight": (10,), "self_attn.q_proj.weight": (4 * dim, 10),
            "self_attn.q_norm.weight": (dim,), "self_attn.o_proj.weight": (10, 4 * dim),
            "post_attention_layernorm.weight": (10,), "pre_feedforward_layernorm.weight": (10,),
            "mlp.gate_proj.weight": (14, 10), "mlp.up_proj.weight": (14, 10), "mlp.down_proj.weight": (10, 14),
            "post_feedforward_layernorm.weight": (10,), "layer_scalar": (1,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**tensors, ORDERING: torch.randperm(12, generator=generator)}


def write(folder: Path, config: Config = CONFIG, tensors: Tensors | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(checkpoint_tensors() if tensors is None else tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def embedding(dtype: torch.dtype = torch.float32, vocab: int = 12, width: int = 6) -> Tensor:
    return torch.randn(vocab, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def load(folder: Path, **options: Any) -> AssistantWeights:
    return AssistantWeights.from_pretrained(folder, options.pop("embed_weight", embedding()), **options)


def check_equal(one: AssistantWeights, two: AssistantWeights) -> None:
    assert one.config == two.config and one.embed_scale == two.embed_scale
    a, b = dict(one.tensors()), dict(two.tensors())
    assert a.keys() == b.keys()
    for name in a:
        assert_same_bits(a[name], b[name])


def flat(config: Config = CONFIG) -> Config:
    """The same config in the older form, as transformers 5.12 writes it."""
    config = copy.deepcopy(config)
    config["text_config"].pop("per_layer_config")
    config["text_config"] |= {"global_head_dim": 8, "num_global_key_value_heads": 1}
    return config


def edited(edit: Callable[[Config, Config], Any], base: Config = CONFIG) -> Config:
    """A copy of the config after edit(config, text_config)."""
    config = copy.deepcopy(base)
    edit(config, config["text_config"])
    return config


def changed(name: str, edit: Callable[[Tensor], Tensor]) -> Tensors:
    tensors = checkpoint_tensors()
    return {**tensors, name: edit(tensors[name]).contiguous()}


def without(*names: str) -> Tensors:
    return {n: t for n, t in checkpoint_tensors().items() if n not in names}


def check_refused(folder: Path, message: str, **options: Any) -> None:
    """Loading raises CheckpointError with exactly this message, or one that begins with it up to an ellipsis."""
    with pytest.raises(CheckpointError) as error:
        load(folder, **options)
    if message.endswith("..."):
        assert str(error.value).startswith(message.removesuffix("..."))
    else:
        assert str(error.value) == message
