"""What the tests of generate() and accelerate() share: a tiny random pair, padded batches, plain transformers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from parity_helpers import FULL, SLIDING, SMALL, make_assistant
from torch import Tensor

from mtp_kernels import AssistantWeights
from mtp_kernels.demo.pair import Pair, load_pair, pair_directory
from mtp_kernels.weights import AssistantConfig

VOCAB = 16
LENGTHS = (100, 37, 64, 1, 130, 80, 66, 20)  # of prompts in a batch; the pair's window is 64


class TinyPair(NamedTuple):
    target: Any  # Gemma4ForCausalLM
    assistant: Any  # Gemma4AssistantForCausalLM
    weights: AssistantWeights


@functools.cache
def trained_pair(head: str) -> Pair:
    return load_pair(pair_directory(), head)


@functools.cache
@torch.no_grad()
def tiny_pair(head: str = "centroid") -> TinyPair:
    """16 tokens and a window of 8. Both models mostly look at the last token, and score it with the same head, so that
    the drafter is often right; their random layers make them differ."""
    config = replace(SMALL, vocab=VOCAB, hidden=SMALL.backbone, num_centroids=4, num_active=2)
    if head == "dense":
        config = replace(config, num_centroids=0, num_active=0)
    target, assistant = make_target(config), make_assistant(config, seed=1)
    identity = torch.eye(config.backbone)
    assistant.pre_projection.weight.copy_(torch.cat([identity, 0.1 * identity], dim=1))
    assistant.lm_head.weight.copy_(target.lm_head.weight)
    if head == "centroid":
        order = assistant.masked_embedding.token_ordering
        assistant.masked_embedding.centroids.weight.copy_(target.lm_head.weight[order].view(4, 4, -1).mean(1))
    for model in (target, assistant):
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.fill_(0.25)
            layer.post_feedforward_layernorm.weight.fill_(0.25)
            layer.layer_scalar.fill_(1.0)
    return TinyPair(target, assistant, AssistantWeights.from_module(assistant, target.model.embed_tokens.weight))


@torch.no_grad()
def make_target(config: AssistantConfig, seed: int = 2) -> Any:
    """A random target whose KV, width and vocabulary are those that the assistant of `config` reads."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    (heads, dim), (full_heads, full_dim) = config.kv_shape(SLIDING), config.kv_shape(FULL)
    text = Gemma4TextConfig(
        vocab_size=config.vocab,
        hidden_size=config.backbone,
        intermediate_size=config.intermediate,
        num_hidden_layers=2,
        num_kv_shared_layers=0,
        layer_types=[SLIDING, FULL],
        num_attention_heads=config.num_qo_heads,
        num_key_value_heads=heads,
        num_global_key_value_heads=full_heads,
        head_dim=dim,
        global_head_dim=full_dim,
        attention_k_eq_v=True,
        sliding_window=config.sliding_window,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    target = Gemma4ForCausalLM(text).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in target.state_dict().items():
        if tensor.dim() == 2:
            loud = 2.0 if name == "lm_head.weight" else 1.0
            tensor.copy_(loud * torch.randn(tensor.shape, generator=generator) * tensor.size(1) ** -0.5)
    return target


def pad(prompts: list[Tensor], left: bool = True) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask) [batch, longest]; what the padding holds is not 0, so that reading it shows."""
    longest = max(p.numel() for p in prompts)
    ids, mask = torch.full((len(prompts), longest), 3), torch.zeros(len(prompts), longest, dtype=torch.int64)
    for b, prompt in enumerate(prompts):
        place = slice(longest - prompt.numel(), longest) if left else slice(prompt.numel())
        ids[b, place], mask[b, place] = prompt, 1
    return ids, mask


def unequal_prompts(pair: Pair) -> list[Tensor]:
    """A prompt of each held-out module, lengths around the window."""
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(len(pair.held_out))]
    return [pair.held_out_prompt(module, length) for module, length in zip(pair.held_out, lengths)]


@functools.cache
def plain_greedy(head: str, max_new_tokens: int) -> tuple[tuple[int, ...], ...]:
    """transformers' own greedy continuations of `unequal_prompts`."""
    pair = trained_pair(head)
    return tuple(tuple(pair.greedy(p, max_new_tokens, [pair.eos_id])) for p in unequal_prompts(pair))


def tiny_greedy(target: Any, prompt: Tensor, max_new_tokens: int) -> list[int]:
    """Greedy decoding by whole forwards of transformers' model, without any cache."""
    ids = prompt[None]
    for _ in range(max_new_tokens):
        logits = target(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[0, prompt.numel() :].tolist()
