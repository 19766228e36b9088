"""Whole draft steps in one call of the CPU library: the bits of the public ops that draft_step() strings together.

`mtp_cpu::draft_step` runs the same kernels in one parallel region, so what is saved is all that lies between them: some
twenty calls from Python a step, and as many starts of the threads. A chain of steps needs no more than one call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from . import _native, _triton
from .kv_view import KVView
from .weights import AssistantWeights

# token_ids, state, positions, row_index, topk -> logprobs, token_ids, state
CpuStep = Callable[[Tensor, Tensor, Tensor, "Tensor | None", int], "tuple[Tensor, Tensor, Tensor]"]
# seed_ids, seed_state, positions, num_steps -> logprobs, token_ids, state of every step
CpuChain = Callable[[Tensor, Tensor, Tensor, int], "tuple[Tensor, Tensor, Tensor]"]

LAYER = (
    "input_norm", "q_proj", "q_norm", "rope_inv_freq", "o_proj", "post_attention_norm", "pre_feedforward_norm",
    "gate_up", "down", "post_feedforward_norm", "layer_scalar",
)  # fmt: skip
VIEW = ("k_cache", "v_cache", "block_table", "seq_lens", "kv_indptr", "k_scale", "v_scale")


def why_no_step(weights: AssistantWeights) -> str:
    """Why the public ops must be called one by one, or ""."""
    if weights.device.type != "cpu":
        return "the weights are not on a CPU"
    if os.environ.get("MTP_FORCE_IMPL", "cpu") != "cpu":
        return "MTP_FORCE_IMPL asks for other kernels"
    if os.environ.get("MTP_DEBUG", "") in ("1", "true", "on"):
        return "MTP_DEBUG checks the arguments of every op"
    if _triton.interpreting():
        return "Triton's interpreter serves the CPU"
    return _native.cpu_library()


def cpu_step(weights: AssistantWeights, kv: Mapping[str, KVView]) -> CpuStep:
    """The step over these caches. It checks nothing: arguments of the same sizes and dtypes must have passed
    draft_step()'s checks, and `why_no_step` must have nothing to say."""
    steps = _steps(weights, kv)

    def step(
        token_ids: Tensor, state: Tensor, positions: Tensor, row_index: Tensor | None, topk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, ids, states = steps(token_ids, state, positions, row_index, topk, 1)
        return logprobs[0], ids[0], states[0]

    return step


def cpu_chain(weights: AssistantWeights, kv: Mapping[str, KVView]) -> CpuChain:
    """Steps of topk 1 over these caches, each from the last one's token and state, as unchecked as `cpu_step`.

    logprobs and token_ids are [num_steps, batch], the states [num_steps, batch, backbone].
    """
    steps = _steps(weights, kv)

    def chain(seed_ids: Tensor, seed_state: Tensor, positions: Tensor, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
        found = steps(seed_ids.unsqueeze(1), seed_state.unsqueeze(1), positions, None, 1, num_steps)
        logprobs, ids, states = found  # [num_steps, batch, 1, 1], the same, [num_steps, batch, 1, backbone]
        return logprobs.flatten(1), ids.flatten(1), states.squeeze(2)

    return chain


def _steps(weights: AssistantWeights, kv: Mapping[str, KVView]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The op behind both, with what stays the same from call to call bound."""
    op = _native.cpu_op("draft_step")
    names = list(dict.fromkeys(layer.layer_type for layer in weights.layers))
    none = torch.empty(0)
    fixed = (
        weights.embed_weight, weights.embed_scale, weights.pre_projection, weights.post_projection, weights.norm,
        weights.norm_eps, weights.lm_head, weights.centroids, weights.token_ordering,
        weights.num_active or 0, weights.centroid_ordered,
        [getattr(layer, name) for layer in weights.layers for name in LAYER],
        [layer.sm_scale for layer in weights.layers],
        [names.index(layer.layer_type) for layer in weights.layers],
        [none if (t := getattr(kv[name], field)) is None else t for name in names for field in VIEW],
        [number for name in names for number in (kv[name].max_seq_len, kv[name].window_left)],
    )  # fmt: skip

    def steps(
        token_ids: Tensor, state: Tensor, positions: Tensor, row_index: Tensor | None, topk: int, num_steps: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = op(token_ids, state, positions, row_index, *fixed, topk, num_steps)
        return found

    return steps
