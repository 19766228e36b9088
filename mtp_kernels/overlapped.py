"""A draft step on the ops' own Triton kernels, which start early and fetch the weights of the next ones ahead.

For assistants with a large hidden size (12B, 26B, 31B), whose steps take as long as their weights: the memory never
waits for a launch. The kernels and their bits are those of the ops. Imports Triton, so import this only where that is
wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .draft import StepOutput
from .kv_view import KVView
from .triton_ops import draft_attention
from .triton_ops._launch import Launch
from .triton_ops._wide_gemm_config import LEAST_WIDE_K
from .triton_ops.linear_norm_add import norm_add_launch, partial_launch
from .triton_ops.norm_linear import norm_linear_launch
from .triton_ops.pre_project import add_splits_launch, gather_launch
from .weights import AssistantWeights, LayerWeights

ops = torch.ops.mtp


def refuses(weights: AssistantWeights, kv: Mapping[str, KVView]) -> str:
    """Why a step does not run so, or ""."""
    if weights.device.type != "cuda" or torch.cuda.get_device_capability(weights.device)[0] < 9:
        return "no kernel starts early below sm_90"
    if weights.centroids is not None:
        return "the head has centroids"
    if weights.dtype.itemsize != 2 or weights.hidden < LEAST_WIDE_K:
        return "fp32, or projections that are not wide"
    missing = [layer.layer_type for layer in weights.layers if layer.layer_type not in kv]
    return f"no view for {missing[0]}" if missing else ""


def overlapped_step(
    weights: AssistantWeights,
    kv: Mapping[str, KVView],
    token_ids: Tensor,
    state: Tensor,
    positions: Tensor,
    *,
    row_index: Tensor | None = None,
    topk: int = 1,
) -> StepOutput:
    """draft_step. Weights and caches must have been written before the graph that this is captured into is launched."""
    eps = weights.norm_eps
    x = state.new_empty((*token_ids.shape, weights.hidden))
    launch = gather_launch(
        token_ids, weights.embed_weight, weights.embed_scale, state, weights.pre_projection, row_index=row_index,
        early=True, ahead=weights.layers[0].q_proj,
    )
    launch.run()
    add_splits_launch(launch.args["partials"], x, early=True).run()
    followers = [*(layer.q_proj for layer in weights.layers[1:]), weights.post_projection]
    for layer, follower in zip(weights.layers, followers):
        x = _layer(layer, kv[layer.layer_type], x, positions, eps, follower)
    normed, after = torch.empty_like(x), x.new_empty((*token_ids.shape, weights.backbone))
    norm_linear_launch(
        x, weights.norm, eps, weights.post_projection, after, normed=normed, early=True, ahead=weights.lm_head
    ).run()
    logprobs, ids, _ = ops.lm_head_topk(normed, weights.lm_head, topk)
    return StepOutput(logprobs, ids, after)


def _layer(
    layer: LayerWeights, kv: KVView, x: Tensor, positions: Tensor, eps: float, follower: Tensor
) -> Tensor:
    """`follower`: the weights that are read after this layer's."""
    q = x.new_empty((*x.shape[:-1], layer.num_qo_heads, layer.head_dim))
    norm_linear_launch(
        x, layer.input_norm, eps, layer.q_proj, q.flatten(-2), early=True, ahead=layer.o_proj
    ).run()
    launches, attended = draft_attention.plan(
        q, kv.k_cache, kv.v_cache, kv.block_table, kv.seq_lens, layer.sm_scale, max_seq_len=kv.max_seq_len,
        window_left=kv.window_left, k_scale=kv.k_scale, v_scale=kv.v_scale, q_norm_weight=layer.q_norm,
        q_norm_eps=eps, rope_inv_freq=layer.rope_inv_freq, positions=positions,
        capability=draft_attention.capability(q.device),
    )
    for launch in launches:
        start_early(launch).run()
    x = _linear_norm_add(attended.flatten(-2), layer.o_proj, layer.post_attention_norm, eps, x, None, layer.gate_up)
    inner = x.new_empty((*x.shape[:-1], layer.down.size(1)))
    norm_linear_launch(
        x, layer.pre_feedforward_norm, eps, layer.gate_up, inner, gated=True, early=True, ahead=layer.down
    ).run()
    return _linear_norm_add(inner, layer.down, layer.post_feedforward_norm, eps, x, layer.layer_scalar, follower)


def _linear_norm_add(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float, residual: Tensor, scale: Tensor | None, follower: Tensor
) -> Tensor:
    product = partial_launch(x, weight, early=True, ahead=follower)
    product.run()
    output = torch.empty_like(residual)
    norm_add_launch(
        product.args["partials"], norm, eps, residual, output, scale=scale, split=True, early=True
    ).run()
    return output


def start_early(launch: Launch, early: bool = True) -> Launch:
    """A launch of a kernel that has the constant EARLY."""
    return replace(launch, constants={**launch.constants, "EARLY": early}, early=early)
