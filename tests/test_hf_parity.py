"""A whole chain against transformers' assistant, step by step on the same committed KV, in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from parity_helpers import CommittedKV, Pair, hf_step, make_pair, random_kv, random_seeds, relative_error
from torch import Tensor

from mtp_kernels import draft
from mtp_kernels.demo.pair import HEADS, load_pair, pair_directory
from mtp_kernels.draft import hidden_step
from mtp_kernels.generation._target import Target
from mtp_kernels.weights import PRESETS

STEPS = 5
LIMIT = 1e-4


def check_chain(pair: Pair, kv: CommittedKV, ids: Tensor, state: Tensor) -> None:
    """Hidden state, candidates' logits and ids of every step of a chain; draft() gives the same ids at once."""
    weights = pair.weights
    views = kv.views(window_left=weights.config.sliding_window)
    positions = torch.tensor(kv.lengths)
    tree = draft(weights, views, ids, state, positions, num_steps=STEPS)
    hf_state = own_state = state
    for step in range(STEPS):
        logits, hf_state = hf_step(pair.assistant, pair.embed, ids, hf_state, positions, kv)
        normed, new_state = hidden_step(weights, views, ids[:, None], own_state[:, None], positions)
        own_state = new_state[:, 0]
        assert relative_error(own_state, hf_state) < LIMIT
        own, tokens = candidates(pair, normed[:, 0])
        assert relative_error(own, logits.gather(1, tokens)) < LIMIT
        ids = logits.argmax(-1)
        assert tree.cand_ids[:, step].tolist() == ids.tolist()
        # transformers' own greedy choice is among the candidates, and is their best
        assert tokens.gather(1, own.argmax(1, keepdim=True))[:, 0].tolist() == ids.tolist()


def candidates(pair: Pair, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and ids of the tokens that the head considers."""
    weights = pair.weights
    if weights.centroids is None:
        logits = normed @ weights.lm_head.T
        return logits, torch.arange(weights.vocab).expand_as(logits)
    return torch.ops.mtp.centroid_logits(
        normed, weights.centroids, weights.token_ordering, weights.lm_head, weights.num_active
    )


def lengths_around(window: int) -> Sequence[int]:
    return (1, window - 1, window, window + 1, 3 * window)


@pytest.mark.parametrize("head", HEADS)
def test_random_weights(head: str) -> None:
    pair = make_pair(head, window=8, seed=7)
    ids, state = random_seeds(pair.weights.config, 5)
    check_chain(pair, random_kv(lengths_around(8), pair.weights.config), ids, state)


@pytest.mark.parametrize("head", HEADS)
def test_e2b_size(head: str) -> None:
    """E2B's own sizes, vocabulary and window, with its centroid head and with a dense one."""
    config = PRESETS["E2B"]
    if head == "dense":
        config = replace(config, num_centroids=0, num_active=0)
    pair = make_pair(config=config, seed=8)
    ids, state = random_seeds(config, 5)
    check_chain(pair, random_kv(lengths_around(config.sliding_window), config), ids, state)


@pytest.mark.parametrize("head", HEADS)
def test_trained_pair_on_its_targets_kv(head: str) -> None:
    """The shipped pair: KV, bonus token and hidden of a target prefill at every length around the window."""
    from transformers import Gemma4AssistantForCausalLM

    loaded = load_pair(pair_directory(), head)
    assistant = Gemma4AssistantForCausalLM.from_pretrained(
        pair_directory() / f"assistant-{head}", dtype=torch.float32, local_files_only=True
    ).eval()
    for length in lengths_around(loaded.model.config.sliding_window):
        target = Target(loaded.model)
        target.open_cache([length], page_size=length)
        logits, seed_state = target.prefill([0], [loaded.held_out_prompt(loaded.held_out[0], length)])
        check_chain(
            Pair(assistant, loaded.model.model.embed_tokens, loaded.weights), committed(target), logits.argmax(-1),
            seed_state,
        )


def committed(target: Target) -> CommittedKV:
    """The target's KV in the layout of transformers: the only request is one page, [1, length, heads, dim]."""
    views: dict[str, Any] = target.kv([0], ["sliding_attention", "full_attention"])
    k = {name: view.k_cache.transpose(1, 2) for name, view in views.items()}
    v = {name: view.v_cache.transpose(1, 2) for name, view in views.items()}
    return CommittedKV((target.cache.lengths[0],), k, v)
