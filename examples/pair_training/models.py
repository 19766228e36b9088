"""The two models' shapes, how a training forward calls transformers' modules, and how they are saved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from .data import BOS, EOS, PAD, VOCAB_SIZE

WINDOW = 64
NUM_CENTROIDS, NUM_ACTIVE = 64, 8
SLIDING, FULL = "sliding_attention", "full_attention"
GLOBAL_HEAD_DIM, NUM_GLOBAL_KV_HEADS = 128, 1
# Exact in bf16 and different in every layer, so that a kernel that forgets or swaps them is found out.
TARGET_SCALARS = (0.875, 1.125, 0.75, 1.25, 0.9375, 1.0625)
ASSISTANT_SCALARS = (0.875, 1.25, 0.75, 1.125)

KVStates = dict[str, tuple[Tensor, Tensor]]
Masks = dict[str, Tensor]


def new_target() -> Gemma4ForCausalLM:
    config = _text_config(hidden_size=256, intermediate_size=512, layer_types=[SLIDING, SLIDING, FULL] * 2, shared=2)
    model = Gemma4ForCausalLM(config)
    _set_scalars(model, TARGET_SCALARS)
    return model


def new_assistant(backbone: int, centroid: bool) -> Gemma4AssistantForCausalLM:
    text = _text_config(hidden_size=128, intermediate_size=320, layer_types=[SLIDING] * 3 + [FULL], shared=4)
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=backbone,
        use_ordered_embeddings=centroid,
        num_centroids=NUM_CENTROIDS,
        centroid_intermediate_top_k=NUM_ACTIVE,
        tie_word_embeddings=True,
    )
    model = Gemma4AssistantForCausalLM(config)
    _set_scalars(model, ASSISTANT_SCALARS)
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def target_forward(target: Gemma4ForCausalLM, ids: Tensor, masks: Masks) -> tuple[Tensor, KVStates]:
    """ids [batch, length] -> hidden after the final norm [batch, length, backbone] and the KV that assistants read."""
    kv: KVStates = {}
    out = target.model(
        inputs_embeds=target.model.embed_tokens(ids),
        per_layer_inputs=no_per_layer_inputs(target, ids),
        attention_mask=masks,
        use_cache=False,
        shared_kv_states=kv,
        return_shared_kv_states=True,
    )
    return out.last_hidden_state, {name: out.shared_kv_states[name] for name in (SLIDING, FULL)}


def draft_step(
    assistant: Gemma4AssistantForCausalLM, embeds: Tensor, state: Tensor, positions: Tensor, kv: KVStates, masks: Masks
) -> tuple[Tensor, Tensor]:
    """One draft step of every query at once: (normed hidden [batch, queries, hidden], next state [.., backbone])."""
    x = assistant.pre_projection(torch.cat([embeds, state.to(embeds.dtype)], dim=-1))
    normed = assistant.model(
        inputs_embeds=x,
        per_layer_inputs=no_per_layer_inputs(assistant, x),
        attention_mask=masks,
        position_ids=positions,
        shared_kv_states=kv,
        use_cache=False,
    ).last_hidden_state
    return normed, assistant.post_projection(normed)


def causal_masks(length: int, device: torch.device) -> Masks:
    """The target's own masks: [1, 1, length, length] bool, True where visible."""
    i = torch.arange(length, device=device)
    full = i <= i[:, None]
    return {FULL: full[None, None], SLIDING: (full & (i[:, None] - i < WINDOW))[None, None]}


def draft_masks(positions: Tensor, length: int) -> Masks:
    """A query at position p sees the rows 0..p-1, or the last WINDOW + 1 of them: [1, 1, queries, length] bool."""
    p, row = positions[:, None], torch.arange(length, device=positions.device)
    full = row < p
    return {FULL: full[None, None], SLIDING: (full & (p - row <= WINDOW + 1))[None, None]}


def save(model: Gemma4ForCausalLM | Gemma4AssistantForCausalLM, folder: Path) -> None:
    """`save_pretrained` in bf16, with the config's flat keys, which transformers 5.17 and 5.24 read alike."""
    scratch = type(model)(model.config)
    scratch.generation_config = model.generation_config
    scratch.load_state_dict(model.state_dict())
    scratch.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text.pop("per_layer_config", None)
    text["global_head_dim"] = GLOBAL_HEAD_DIM
    text["num_global_key_value_heads"] = NUM_GLOBAL_KV_HEADS
    if text is config:
        # transformers 5.24 indexes the missing per-layer inputs of a model with KV-shared layers when it slices a
        # prefill down to the last row; it does not slice when hidden states are asked for.
        config["output_hidden_states"] = True
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone


def load_target(folder: Path, device: torch.device) -> Gemma4ForCausalLM:
    model = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.output_hidden_states = False
    return model.to(device).eval()


def load_assistant(folder: Path, device: torch.device) -> Gemma4AssistantForCausalLM:
    return Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def _text_config(hidden_size: int, intermediate_size: int, layer_types: list[str], shared: int) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_kv_shared_layers=shared,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=NUM_GLOBAL_KV_HEADS,
        head_dim=64,
        global_head_dim=GLOBAL_HEAD_DIM,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        max_position_embeddings=4096,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )


def _set_scalars(model: Gemma4ForCausalLM | Gemma4AssistantForCausalLM, scalars: tuple[float, ...]) -> None:
    for layer, scalar in zip(model.model.layers, scalars):
        layer.layer_scalar.fill_(scalar)
        # The residual branches start small; with norms behind them a weight of 1 would make every layer as loud as
        # the embedding.
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            torch.nn.init.constant_(norm.weight, 1 / math.sqrt(2 * len(scalars)))


def no_per_layer_inputs(model: Gemma4ForCausalLM | Gemma4AssistantForCausalLM, x: Tensor) -> Tensor:
    """[batch, length, layers, 0]: given, so that transformers 5.24 can slice it (it slices None otherwise)."""
    return torch.empty(*x.shape[:2], model.config.get_text_config().num_hidden_layers, 0, device=x.device)
