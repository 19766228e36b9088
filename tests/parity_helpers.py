"""What tests against transformers share: small random assistants, committed KV, and transformers' own draft step.

    pair = make_pair(head="centroid", window=8, seed=0)
    kv = random_kv([1, 7, 8, 9, 24], pair.weights.config)
    logits, state = hf_step(pair.assistant, pair.embed, ids, state, positions, kv)     # transformers
    step = draft_step(pair.weights, kv.views(window_left=8), ids[:, None], state[:, None], positions)   # this library

To unroll a chain, feed `logits.argmax(-1)` and `state` back with the same positions. transformers has positions =
the committed lengths and window_left = W.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_kernels import AssistantWeights, KVView
from mtp_kernels.weights import AssistantConfig, AttentionConfig

SLIDING, FULL = "sliding_attention", "full_attention"
# Every feature of the real ones, at the head_dims that kernels are built for. Odd enough that a swap is an error.
SMALL = AssistantConfig(
    architecture="Gemma4AssistantForCausalLM",
    vocab=64,
    hidden=32,
    intermediate=56,
    backbone=48,
    num_qo_heads=4,
    layer_types=(SLIDING, SLIDING, SLIDING, FULL),
    attention=(AttentionConfig(SLIDING, 2, 64, 1e4, 32), AttentionConfig(FULL, 1, 128, 1e6, 16)),
    sliding_window=8,
    num_centroids=8,
    num_active=3,
)


class Pair(NamedTuple):
    assistant: Any  # transformers' module, in eval mode, without gradients
    embed: Any  # the target's input embedding as a module: scaled, backbone wide
    weights: AssistantWeights  # sharing the memory of both


def small_config(head: str = "centroid", window: int = 8, unified: bool = False) -> AssistantConfig:
    """SMALL with another head ("centroid" or "dense"), window or class (the 12B's, where `unified`)."""
    config = replace(SMALL, sliding_window=window)
    if head == "dense":
        config = replace(config, num_centroids=0, num_active=0)
    return replace(config, architecture="Gemma4UnifiedAssistantForCausalLM") if unified else config


def make_pair(
    head: str = "centroid",
    window: int = 8,
    seed: int = 0,
    *,
    unified: bool = False,
    config: AssistantConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> Pair:
    """A random assistant and the embedding of a target for it; `config` (a preset, say) overrides the small one."""
    config = config or small_config(head, window, unified)
    assistant = make_assistant(config, seed).to(dtype)
    embed = make_embedding(config, seed + 1).to(dtype)
    return Pair(assistant, embed, AssistantWeights.from_module(assistant, embed.weight))


def hf_config(config: AssistantConfig) -> Any:
    """transformers' config of these sizes."""
    import transformers

    unified = "Unified" in config.architecture
    text_class = transformers.Gemma4UnifiedTextConfig if unified else transformers.Gemma4TextConfig
    whole_class = transformers.Gemma4UnifiedAssistantConfig if unified else transformers.Gemma4AssistantConfig
    without = {} if unified else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    (sliding_heads, sliding_dim), (full_heads, full_dim) = config.kv_shape(SLIDING), config.kv_shape(FULL)
    full = config.attention_of(FULL)
    text = text_class(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=len(config.layer_types),
        num_kv_shared_layers=len(config.layer_types),
        layer_types=list(config.layer_types),
        num_attention_heads=config.num_qo_heads,
        num_key_value_heads=sliding_heads,
        num_global_key_value_heads=full_heads,
        head_dim=sliding_dim,
        global_head_dim=full_dim,
        attention_k_eq_v=True,
        sliding_window=config.sliding_window,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": config.attention_of(SLIDING).rope_theta},
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


def hf_class(config: AssistantConfig) -> Any:
    import transformers

    return getattr(transformers, config.architecture)


@torch.no_grad()
def make_assistant(config: AssistantConfig, seed: int) -> Any:
    """transformers' module with random values in every parameter and buffer that it saves."""
    assistant = hf_class(config)(hf_config(config)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in assistant.state_dict().items():
        if name == "masked_embedding.token_ordering":
            tensor.copy_(torch.randperm(config.vocab, generator=generator))
        elif tensor.dim() == 2:  # activations keep their size; a tied weight is filled twice
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.size(1) ** -0.5)
        else:
            tensor.copy_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
    return assistant


@torch.no_grad()
def make_embedding(config: AssistantConfig, seed: int) -> Any:
    """The scaled input embedding of a Gemma 4 target with this assistant."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

    # Of one row, so that transformers does not fill 400 million elements, which are replaced at once.
    embed = Gemma4TextScaledWordEmbedding(1, config.backbone, 0, embed_scale=config.backbone**0.5)
    embed.num_embeddings = config.vocab
    embed.weight = torch.nn.Parameter(_rows(config.vocab, config.backbone, seed).clone())
    return embed.eval().requires_grad_(False)


@functools.lru_cache(maxsize=1)
def _rows(vocab: int, width: int, seed: int) -> Tensor:
    """E2B's take some seconds, and its two heads have the same."""
    return torch.randn(vocab, width, generator=torch.Generator().manual_seed(seed)).mul_(width**-0.5)


@dataclass(frozen=True)
class CommittedKV:
    """The committed keys and values of a batch; what lies behind a request's length is NaN."""

    lengths: tuple[int, ...]
    k: dict[str, Tensor]  # layer type -> [batch, num_kv_heads, longest, head_dim]
    v: dict[str, Tensor]

    def request(self, b: int) -> dict[str, tuple[Tensor, Tensor]]:
        """transformers' shared_kv_states of one request: its committed rows only, [1, heads, length, dim] each."""
        n = self.lengths[b]
        return {t: (self.k[t][b : b + 1, :, :n], self.v[t][b : b + 1, :, :n]) for t in self.k}

    def views(self, window_left: int) -> dict[str, KVView]:
        """This library's views of the same memory; the window is the sliding layers'."""
        seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        windows = {SLIDING: window_left, FULL: -1}
        return {t: KVView.dense(self.k[t], self.v[t], seq_lens, window_left=windows[t]) for t in self.k}


def random_kv(
    lengths: Sequence[int], config: AssistantConfig = SMALL, seed: int = 0, dtype: torch.dtype = torch.float32
) -> CommittedKV:
    """Random KV of these committed lengths, each at least 1, scaled so that every visible key gets some attention."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = {}, {}
    behind = torch.arange(max(lengths)) >= torch.tensor(lengths).unsqueeze(1)  # [batch, longest]
    for layer_type in (SLIDING, FULL):
        heads, dim = config.kv_shape(layer_type)
        k, v = torch.randn(2, len(lengths), heads, max(lengths), dim, generator=generator).unbind()
        hidden = behind[:, None, :, None]
        keys[layer_type] = (k * dim**-0.5).masked_fill(hidden, torch.nan).to(dtype)
        values[layer_type] = v.masked_fill(hidden, torch.nan).to(dtype)
    return CommittedKV(tuple(lengths), keys, values)


@torch.no_grad()
def hf_step(
    assistant: Any, embed: Any, ids: Tensor, state: Tensor, positions: Tensor, kv: CommittedKV
) -> tuple[Tensor, Tensor]:
    """One step of transformers' assistant for every request of a batch, each in a forward() of its own.

    The sliding layers are given all committed rows, and transformers' own mask leaves them the last W + 1 of them.
    No padding and no neighbours take part: a batch in one forward() would need masks, and the logits outside the
    centroids would be the lowest over the whole batch.

    Args:
        ids: [batch], the token that each request drafts from.
        state: [batch, backbone], the target's hidden in the first step, this function's state afterwards.
        positions: [batch], the same in every step of a round.

    Returns:
        logits [batch, vocab] (transformers fills those outside a centroid head's candidates with the lowest - 1) and
        state [batch, backbone].
    """
    logits, states = [], []
    for b in range(len(kv.lengths)):
        inputs = torch.cat([embed(ids[b]), state[b]])  # [2 * backbone]
        out = assistant(
            inputs_embeds=inputs[None, None], position_ids=positions[b].view(1, 1), shared_kv_states=kv.request(b)
        )
        logits.append(out.logits[0, 0])
        states.append(out.last_hidden_state[0, 0])
    return torch.stack(logits), torch.stack(states)


def random_seeds(config: AssistantConfig, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Seed ids [batch] and seed states [batch, backbone] of a round."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(config.vocab, (batch,), generator=generator),
        torch.randn(batch, config.backbone, generator=generator),
    )


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected magnitude."""
    return float((got - expected).abs().max() / expected.abs().max())
