"""A draft round on private kernels that cross the borders of ops: a few launches a layer instead of draft()'s ten.

For assistants with a small hidden size and a centroid head (E2B, E4B), whose steps take as long as their launches: on
Triton kernels alone, or with a workspace on segments (_segment.py), in CUDA. For those with a dense head (12B, 26B-A4B,
31B), whose steps wait for memory: for few rows, on kernels that keep it busy (_dense_round.py). Where `refuses` says
nothing, `draft_chain` and `draft_tree` give what draft() gives, but for the rounding of sums in another order. Imports
Triton, so import this only where that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _dense_round, _segment, _triton
from ._attention import plan as plan_attention
from ._cuda_launch import CudaLaunch
from .draft import DraftTree, num_candidates
from .kv_view import KVView
from .ops.centroid_topk import serves as serves_head
from .ops.draft_attention import triton_serves
from .ops.lm_head_topk import serves as serves_dense_head
from .triton_ops import _round
from .triton_ops._centroids import candidate_launch, pieces, rank_launch
from .triton_ops._launch import Launch, capability, count_sms
from .triton_ops._topk import merge_launch, new_parts, new_results
from .weights import AssistantWeights, LayerWeights

Emit = Callable[["Launch | CudaLaunch"], None]  # what becomes of a launch: run, or collected to be compiled
ops = torch.ops.mtp


class Chain(NamedTuple):
    """What drafting a chain computes; the links of a chain are the same for every draft."""

    draft_ids: Tensor  # [batch, nodes]
    draft_positions: Tensor | None  # [batch, nodes]
    cand_ids: Tensor  # [batch, steps]
    cand_scores: Tensor  # [batch, steps]
    states: list[Tensor]  # [batch, backbone] after each step


def _run(launch: Launch | CudaLaunch) -> None:
    launch.run()


@dataclass(frozen=True)
class Drafter:
    """The assistant, the target's cache and the positions of a round; `early` lets kernels overlap (sm_90).

    With a `workspace` (_segment.new_workspace) for all its rows, segments run what lies between the attentions.
    """

    weights: AssistantWeights
    kv: Mapping[str, KVView]
    positions: Tensor  # [batch]
    early: bool = False
    emit: Emit = _run
    workspace: Tensor | None = None


def refuses(weights: AssistantWeights, kv: Mapping[str, KVView], topk: int, max_batch: int = 1) -> str:
    """Why these kernels do not serve rounds of up to max_batch requests, or ""."""
    hidden, dense = weights.hidden, weights.centroids is None
    most = _dense_round.MOST_HIDDEN if dense else _round.MOST_HIDDEN
    if hidden > most or hidden & (hidden - 1) or hidden < 16:
        return f"hidden {hidden} is not a power of 2 from 16 to {most}"
    if weights.device.type != "cuda" and not _triton.interpreting():
        return f"no Triton on {weights.device.type}"
    if weights.dtype.itemsize != 2 and weights.device.type == "cuda":
        return "fp32"
    if dense and max_batch * topk > _dense_round.MOST_ROWS:
        return f"{max_batch * topk} rows of a dense head are more than {_dense_round.MOST_ROWS}"
    if topk > 64:
        return "topk above 64"
    if why := _refuses_weights(weights) or _refuses_head(weights, topk):
        return why
    for layer in weights.layers:
        if layer.layer_type not in kv:
            return f"no view for {layer.layer_type}"
        view = kv[layer.layer_type]
        q = weights.lm_head.new_empty((1, topk, layer.num_qo_heads, layer.head_dim), device="meta")
        if why := triton_serves(q, view.k_cache):
            return why
    return ""


def _refuses_weights(weights: AssistantWeights) -> str:
    """The kernels read rows of one dtype by their stride; what else the ops take or refuse is theirs."""
    for name, tensor in weights.tensors():
        if tensor.is_floating_point() and not name.endswith("rope_inv_freq") and tensor.dtype != weights.dtype:
            return f"{name} of {tensor.dtype}"
        if tensor.size(-1) > 1 and tensor.stride(-1) != 1:
            return f"{name}, whose last dimension is not contiguous"
    return ""


def _refuses_head(weights: AssistantWeights, topk: int) -> str:
    if weights.centroids is None:
        return serves_dense_head(weights.norm, weights.lm_head, topk)
    assert weights.token_ordering is not None
    head = (weights.norm, weights.centroids, weights.token_ordering, weights.lm_head, weights.num_active, topk)
    if why := serves_head(*head):
        return why
    columns = [weights.backbone, *(n for layer in weights.layers for n in (layer.q_proj.size(0), layer.down.size(1)))]
    if any(n % 16 for n in columns) or weights.centroids.size(0) % 16:
        return "a projection whose columns are no multiple of 16"
    return ""


def overlaps(device: torch.device) -> bool:
    """Whether kernels may start early there."""
    return capability(device) >= 90


def draft_chain(
    drafter: Drafter, seed_ids: Tensor, seed_state: Tensor, num_steps: int, num_draft_tokens: int | None,
    root_positions: Tensor | None
) -> Chain:
    """draft() with topk 1."""
    batch = seed_ids.size(0)
    size = num_steps + 1 if num_draft_tokens is None else num_draft_tokens
    cand_ids = seed_ids.new_empty((batch, num_steps), dtype=torch.int64)
    logprobs, cand_scores = (seed_state.new_empty((batch, num_steps), dtype=torch.float32) for _ in range(2))
    state, parts, states = seed_state.unsqueeze(1), None, []
    for step in range(num_steps):
        source: dict[str, Any] = {"token_ids": seed_ids.unsqueeze(1)}
        if parts is not None:
            source = {"parts": parts, "ids_out": cand_ids[:, step - 1], "logprobs_out": logprobs[:, step - 1]}
        _, state, parts = _step(drafter, batch, 1, state, source, depth=1)
        states.append(state[:, 0])
    draft_ids = cand_ids.new_empty((batch, size))
    positions = None if root_positions is None else cand_ids.new_empty((batch, size))
    assert parts is not None
    drafter.emit(
        _round.finish(parts, seed_ids, root_positions, cand_ids, logprobs, cand_scores, draft_ids, positions,
                      early=drafter.early)
    )
    return Chain(draft_ids, positions, cand_ids, cand_scores, states)


def draft_tree(
    drafter: Drafter, seed_ids: Tensor, seed_state: Tensor, num_steps: int, topk: int, num_draft_tokens: int | None,
    root_positions: Tensor
) -> DraftTree:
    """draft() with topk > 1: tree_expand and tree_build stay ops of their own."""
    batch = seed_ids.size(0)
    ids, state = seed_ids.unsqueeze(1), seed_state.unsqueeze(1)
    row_index = scores = frontier = None
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    offset = 0
    for _ in range(num_steps):
        rows = ids.size(1)
        source = {"token_ids": ids, "row_index": row_index}
        normed, state, parts = _step(drafter, batch, rows, state, source, depth=topk)
        results = new_results(normed.view(batch, rows, -1), topk)
        unranked: dict[str, Tensor | None] = {"best_values": None, "best_orders": None}
        drafter.emit(merge_launch(parts, results, topk, ranked=unranked, packed=True))
        ids, row_index, scores, frontier, cand_scores, cand_parent = ops.tree_expand(
            results["logprobs"], results["token_ids"], offset, scores=scores, frontier=frontier
        )
        found.append((results["token_ids"].flatten(1), cand_scores, cand_parent))
        offset += rows * topk
    cand_ids, cand_scores, cand_parent = (torch.cat(parts, dim=1) for parts in zip(*found))
    size = num_candidates(num_steps, topk) + 1 if num_draft_tokens is None else num_draft_tokens
    built = ops.tree_build(seed_ids, cand_scores, cand_ids, cand_parent, root_positions, size)
    return DraftTree._make((*built, cand_ids, cand_scores))


def _step(
    drafter: Drafter, batch: int, rows: int, state: Tensor, source: dict[str, Any], depth: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One step: (normed [batch * rows, hidden], state [batch, rows, backbone], the head's partial lists)."""
    if drafter.weights.centroids is None:
        return _dense_step(drafter, batch, rows, state, source, depth)
    weights, early, emit = drafter.weights, drafter.early, drafter.emit
    total = batch * rows
    launch, x = _round.pre(
        weights.pre_projection, weights.embed_weight, weights.embed_scale, state, total, early=early, **source
    )
    emit(launch)
    assert weights.centroids is not None and weights.token_ordering is not None
    num_centroids = weights.centroids.size(0)
    normed = state.new_empty((total, weights.hidden))
    after = state.new_empty((batch, rows, weights.backbone))
    scores = state.new_empty((total, num_centroids), dtype=torch.float32)
    group_max = state.new_empty((total, num_centroids // _round.GROUP), dtype=torch.float32)
    if drafter.workspace is None:
        for layer in weights.layers:
            x = _layer(drafter, layer, x, batch, rows)
        x, _ = _settle(drafter, x, state.new_empty((total, weights.hidden)))
        emit(
            _round.norm_linear(x, None, weights.norm, weights.norm_eps, weights.post_projection, after, normed=normed,
                               centroids=weights.centroids, scores=scores, group_max=group_max, early=early)
        )
    else:
        residual, q = _queries(drafter, weights.layers[0], x, batch, rows)
        _segments(drafter, residual, q, batch, rows, normed, after, scores, group_max)
    size = weights.token_ordering.size(0) // num_centroids
    if drafter.workspace is not None and depth == 1 and _segment.ranks(weights):
        parts = new_parts(normed, total, weights.num_active * (size // _segment.PART_TOKENS), depth)
        emit(_segment.candidates(weights, scores, normed, parts, early=early))
        return normed, after, parts
    parts = new_parts(normed, total, weights.num_active * pieces(size), depth)
    launch, chosen = rank_launch(scores, group_max, _round.GROUP, weights.num_active)
    emit(launch.with_early(early))
    launch = candidate_launch(
        normed, chosen, weights.token_ordering, weights.lm_head, num_centroids, weights.centroid_ordered, outputs=parts,
        depth=depth
    )
    emit(launch.with_early(early))
    return normed, after, parts


def _dense_step(
    drafter: Drafter, batch: int, rows: int, state: Tensor, source: dict[str, Any], depth: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """_step of an assistant with a dense head."""
    early = drafter.early

    def attend(layer: LayerWeights, q: Tensor) -> Tensor:
        launches, attended = _attention(drafter, layer, q)
        kv = drafter.kv[layer.layer_type]
        for launch in launches:
            drafter.emit(_dense_round.overlap(launch, early, kv.k_cache, kv.v_cache))
        return attended

    return _dense_round.step(drafter.weights, batch, rows, state, source, depth, early, attend, drafter.emit)


def _segments(
    drafter: Drafter, x: Tensor, q: Tensor, batch: int, rows: int, normed: Tensor, after: Tensor, scores: Tensor,
    group_max: Tensor
) -> None:
    """All layers from x [batch * rows, hidden] and the first one's queries to the head's projections."""
    weights = drafter.weights
    assert drafter.workspace is not None
    for layer, following in zip(weights.layers, (*weights.layers[1:], None)):
        launches, attended = _attention(drafter, layer, q.view(batch, rows, layer.num_qo_heads, layer.head_dim))
        now = (launches, attended, drafter.kv[layer.layer_type], layer, weights.norm_eps, x)
        if following is not None:
            x_out, q = torch.empty_like(x), x.new_empty((batch * rows, following.q_proj.size(0)))
            launches, segment = _segment.segment(
                *now, following.input_norm, following.q_proj, q, drafter.workspace, x_out=x_out, early=drafter.early
            )
            x = x_out
        else:
            launches, segment = _segment.segment(
                *now, weights.norm, weights.post_projection, after.view(batch * rows, -1), drafter.workspace,
                normed=normed, centroids=weights.centroids, scores=scores, group_max=group_max, early=drafter.early,
            )
        for launch in launches:
            launch = launch.with_early(drafter.early)
            drafter.emit(_segment.beside(launch) if layer is weights.layers[0] and batch * rows > 1 else launch)
        drafter.emit(segment)


def _layer(drafter: Drafter, layer: LayerWeights, x: _round.Pending, batch: int, rows: int) -> _round.Pending:
    eps, early, emit = drafter.weights.norm_eps, drafter.early, drafter.emit
    total = batch * rows
    residual, q = _queries(drafter, layer, x, batch, rows)
    between = torch.empty_like(residual)
    launches, attended = _attention(drafter, layer, q)
    for launch in launches:
        emit(launch.with_early(early))
    launch, x = _round.linear(attended.view(total, -1), layer.o_proj, early=early)
    emit(launch)
    x, left = _settle(drafter, x.after(residual, layer.post_attention_norm), between)
    inner = residual.new_empty((total, layer.down.size(1)))
    emit(_round.geglu(x, left, layer.pre_feedforward_norm, eps, layer.gate_up, inner, early=early))
    launch, x = _round.linear(inner, layer.down, early=early)
    emit(launch)
    return x.after(between, layer.post_feedforward_norm, layer.layer_scalar)


def _queries(
    drafter: Drafter, layer: LayerWeights, x: _round.Pending, batch: int, rows: int
) -> tuple[Tensor, Tensor]:
    """x [batch * rows, hidden] made, and the layer's queries [batch, rows, num_qo_heads, head_dim]."""
    weights = drafter.weights
    residual = weights.norm.new_empty((batch * rows, weights.hidden))
    x, left = _settle(drafter, x, residual)
    q = residual.new_empty((batch, rows, layer.num_qo_heads, layer.head_dim))
    drafter.emit(
        _round.norm_linear(x, left, layer.input_norm, weights.norm_eps, layer.q_proj, q, early=drafter.early)
    )
    return residual, q


def _attention(drafter: Drafter, layer: LayerWeights, q: Tensor) -> tuple[Sequence[Launch | CudaLaunch], Tensor]:
    kv = drafter.kv[layer.layer_type]
    return plan_attention(
        q, kv.k_cache, kv.v_cache, kv.block_table, kv.seq_lens, layer.sm_scale, max_seq_len=kv.max_seq_len,
        window_left=kv.window_left, k_scale=kv.k_scale, v_scale=kv.v_scale, q_norm_weight=layer.q_norm,
        q_norm_eps=drafter.weights.norm_eps, rope_inv_freq=layer.rope_inv_freq, positions=drafter.positions,
        capability=capability(q.device), sms=count_sms(q.device),
    )


def _settle(drafter: Drafter, x: _round.Pending, x_out: Tensor) -> tuple[_round.Pending, Tensor | None]:
    """x, and where the kernel that takes it in has to leave it; of many rows a kernel of its own does that before."""
    launches, x, left = _round.settle(x, x_out, drafter.weights.norm_eps, early=drafter.early)
    for launch in launches:
        drafter.emit(launch)
    return x, left
