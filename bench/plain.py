"""One draft step in PyTorch's own functions, as an engine writes it: the peer `pytorch`, what torch.compile is given,
and the yardstick of every step's check. Attention is a function of the caller, so that each peer's kernel fits in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv_view import KVView
from ..weights import AssistantWeights, LayerWeights
from .case import Call
from .ops import centroid_logits, draft_attention, linear_norm_add, norm_geglu, norm_linear, post_project, pre_project

Attend = Callable[[Tensor], Tensor]  # q [batch, rows, num_qo_heads, head_dim], normed and turned -> the same shape


class Rotation(NamedTuple):
    """Cosine and sine of a layer type at the positions of a round, [batch, rows or 1, 1, head_dim]."""

    cos: Tensor
    sin: Tensor


def rotations(weights: AssistantWeights, positions: Tensor) -> dict[str, Rotation]:
    """What engines look up in a table: computed once a round, since positions stay."""
    made = {}
    for layer in weights.layers:
        if layer.layer_type not in made:
            angle = positions.float().reshape(positions.size(0), -1, 1, 1) * layer.rope_inv_freq
            still = layer.head_dim // 2 - angle.size(-1)
            angle = torch.nn.functional.pad(angle, (0, still)).repeat(1, 1, 1, 2)
            made[layer.layer_type] = Rotation(angle.cos().to(weights.dtype), angle.sin().to(weights.dtype))
    return made


def step(
    weights: AssistantWeights,
    attends: Sequence[Attend],  # one a layer
    rotation: Mapping[str, Rotation],
    token_ids: Tensor,  # [batch, rows]
    state: Tensor,  # [batch, rows, backbone]
) -> tuple[Tensor, Tensor, Tensor]:
    """(next_ids [batch, rows], state [batch, rows, backbone], normed [batch, rows, hidden])."""
    x = pre_project.pytorch(token_ids, weights.embed_weight, weights.embed_scale, state, weights.pre_projection)
    for layer, attend in zip(weights.layers, attends):
        x = _layer(layer, attend, rotation[layer.layer_type], x, weights.norm_eps)
    normed, state = post_project.pytorch(x, weights.norm, weights.norm_eps, weights.post_projection)
    return _best(weights, normed), state, normed


def _layer(layer: LayerWeights, attend: Attend, rotation: Rotation, x: Tensor, eps: float) -> Tensor:
    q = norm_linear.pytorch(x, layer.input_norm, eps, layer.q_proj).unflatten(-1, (layer.num_qo_heads, -1))
    q = torch.nn.functional.rms_norm(q, (layer.head_dim,), layer.q_norm, eps)
    one, two = q.chunk(2, -1)
    q = q * rotation.cos + torch.cat((-two, one), -1) * rotation.sin
    attended = attend(q).flatten(-2)
    x = linear_norm_add.pytorch(attended, layer.o_proj, layer.post_attention_norm, eps, x)
    inner = norm_geglu.pytorch(x, layer.pre_feedforward_norm, eps, layer.gate_up)
    scale = layer.layer_scalar
    return linear_norm_add.pytorch(inner, layer.down, layer.post_feedforward_norm, eps, x, scale=scale)


def _best(weights: AssistantWeights, normed: Tensor) -> Tensor:
    if weights.centroids is None or weights.token_ordering is None:
        return torch.nn.functional.linear(normed, weights.lm_head).argmax(-1)
    logits, ids = centroid_logits.pytorch_candidates(
        normed, weights.centroids, weights.token_ordering, weights.lm_head, weights.num_active,
        weights.centroid_ordered,
    )
    return ids.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)


def attention(
    view: KVView, context: int, function: Callable[..., Tensor] = draft_attention.pytorch
) -> Attend:
    """PyTorch's own attention through the page table; every request has `context` keys."""
    call = view_call(view, context)
    return lambda q: function(q, *call.args, **call.kwargs)


def view_call(view: KVView, context: int) -> Call:
    """What draft_attention gets from a view, but for q."""
    kwargs = {"window_left": view.window_left, "max_seq_len": context}
    if view.k_scale is not None:
        kwargs |= {"k_scale": view.k_scale, "v_scale": view.v_scale}
    return Call((view.k_cache, view.v_cache, view.block_table, view.seq_lens, 1.0), kwargs)
