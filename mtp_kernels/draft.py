"""The draft loop: from one seed a request to a draft (chain or tree) ready for the target to verify.

Nothing here computes: it strings public ops together, reads no device value on the host, and so runs eagerly, under
torch.compile, and inside a CUDA graph that an engine captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .kv_view import KVView
from .ops._checks import check_device, check_index, check_range, check_shape, fail
from .ops._suppress import check_suppress_ids
from .weights import AssistantWeights, LayerWeights

ops = torch.ops.mtp


class DraftTree(NamedTuple):
    """A draft for every request: N nodes, node 0 the root (the seed token), the others drafted.

    A chain is the tree in which every node has one child. Nodes are ordered so that parents come first.
    """

    draft_ids: Tensor  # [batch, N] int64, the root's is the seed id
    draft_positions: Tensor | None  # [batch, N] int64, root_positions + depth; None where root_positions was not given
    parents: Tensor  # [batch, N] int64, node; -1 at the root
    selected: Tensor  # [batch, N - 1] int64, the candidate that each node after the root is
    tree_mask: Tensor  # [batch, N, N] bool, ancestors and itself
    retrieve_index: Tensor  # [batch, N] int64, b * N + node
    retrieve_next_token: Tensor  # [batch, N] int64, first child; -1 for none
    retrieve_next_sibling: Tensor  # [batch, N] int64, next child of the same parent; -1 for none
    cand_ids: Tensor  # [batch, num_candidates] int64, every candidate of every step
    cand_scores: Tensor  # [batch, num_candidates] fp32, sum of logprobs from the root


class StepOutput(NamedTuple):
    """What one draft step gives for each of its rows."""

    logprobs: Tensor  # [batch, rows, topk] fp32, over the head's candidates
    token_ids: Tensor  # [batch, rows, topk] int64, best first
    state: Tensor  # [batch, rows, backbone], the recurrent state of the next step


def draft(
    weights: AssistantWeights,
    kv: Mapping[str, KVView],
    seed_ids: Tensor,
    seed_state: Tensor,
    positions: Tensor,
    num_steps: int = 4,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    root_positions: Tensor | None = None,
    suppress_ids: Tensor | None = None,
) -> DraftTree:
    """Draft `num_steps` tokens ahead of every request, as a chain (topk 1) or a tree.

    Args:
        weights: the assistant.
        kv: one view of the target's cache a layer type, for example {"sliding_attention": ..., "full_attention": ...};
            its seq_lens are the committed lengths, and nothing is written to it.
        seed_ids: [batch] int32 or int64, the bonus token of each request, which the target has not processed yet.
        seed_state: [batch, backbone], the target's hidden after its final norm at the row that predicted the bonus
            token, in the dtype of the weights.
        positions: [batch] int, the RoPE position of every draft query of the round. The engines differ: the committed
            length for transformers, the committed length - 1 for vLLM and SGLang.
        num_steps: depth of the draft, at least 1.
        topk: branches a step; 1 drafts a chain.
        num_draft_tokens: N, nodes of the result with the root; None keeps every candidate:
            1 + topk + (num_steps - 1) * topk^2.
        root_positions: [batch] int, the target's position of the root (the committed length); required for topk > 1.
            Without it a chain has no draft_positions.
        suppress_ids: [n] int, tokens that must never be drafted (-1 for none): their logits count as -inf.

    Returns:
        DraftTree. `verify_greedy` or `verify_sample` take its ids and links.

    Raises:
        ArgumentError: a missing layer type, or a wrong size, dtype or device; the message names the argument.

    >>> from mtp_kernels import AssistantWeights, KVView, draft
    >>> weights = AssistantWeights.synthetic("tiny", dtype=torch.float32)
    >>> def view(layer_type, window_left):
    ...     spec = weights.config.kv_shape(layer_type)  # (num_kv_heads, head_dim)
    ...     return KVView.dense(torch.randn(2, spec[0], 10, spec[1]), torch.randn(2, spec[0], 10, spec[1]),
    ...                         window_left=window_left)
    >>> kv = {"sliding_attention": view("sliding_attention", 7), "full_attention": view("full_attention", -1)}
    >>> lengths = torch.tensor([10, 10])
    >>> tree = draft(weights, kv, torch.tensor([3, 5]), torch.randn(2, weights.backbone), lengths, num_steps=3)
    >>> tree.draft_ids.shape, tree.parents[0].tolist()
    (torch.Size([2, 4]), [-1, 0, 1, 2])
    """
    check_draft(
        weights, kv, seed_ids, seed_state, positions, num_steps, topk, num_draft_tokens, root_positions, suppress_ids
    )

    def step(ids: Tensor, state: Tensor, row_index: Tensor | None) -> StepOutput:
        return draft_step(
            weights, kv, ids, state, positions, row_index=row_index, topk=topk, suppress_ids=suppress_ids
        )

    return draft_with(step, seed_ids, seed_state, num_steps, topk, num_draft_tokens, root_positions)


Step = Callable[[Tensor, Tensor, "Tensor | None"], StepOutput]  # token_ids, state, row_index


def draft_with(
    step: Step,
    seed_ids: Tensor,
    seed_state: Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int | None,
    root_positions: Tensor | None,
) -> DraftTree:
    """draft() around any step, with its arguments unchecked."""
    if topk == 1:
        return _draft_chain(step, seed_ids, seed_state, num_steps, num_draft_tokens, root_positions)
    assert root_positions is not None
    return _draft_tree(step, seed_ids, seed_state, num_steps, topk, num_draft_tokens, root_positions)


def num_candidates(num_steps: int, topk: int) -> int:
    """Candidates of a round: topk in the first step, topk for each of topk frontier rows in the others."""
    return topk + (num_steps - 1) * topk**2


def draft_step(
    weights: AssistantWeights,
    kv: Mapping[str, KVView],
    token_ids: Tensor,
    state: Tensor,
    positions: Tensor,
    *,
    row_index: Tensor | None = None,
    topk: int = 1,
    suppress_ids: Tensor | None = None,
) -> StepOutput:
    """One step of token_ids [batch, rows]; a row grows from row `row_index` of state [batch, prev_rows, backbone]."""
    normed, state = hidden_step(weights, kv, token_ids, state, positions, row_index=row_index)
    logprobs, ids, _ = _head(weights, normed, topk, suppress_ids)
    return StepOutput(logprobs, ids, state)


def hidden_step(
    weights: AssistantWeights,
    kv: Mapping[str, KVView],
    token_ids: Tensor,
    state: Tensor,
    positions: Tensor,
    *,
    row_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step without its head: (normed [batch, rows, hidden], state [batch, rows, backbone])."""
    x = ops.pre_project(
        token_ids, weights.embed_weight, weights.embed_scale, state, weights.pre_projection, row_index=row_index
    )  # [batch, rows, hidden]
    return layers_step(weights, kv, x, positions)


def layers_step(
    weights: AssistantWeights, kv: Mapping[str, KVView], x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The layers over x [batch, rows, hidden], already projected: (normed [batch, rows, hidden], state)."""
    for layer in weights.layers:
        x = _layer(layer, kv[layer.layer_type], x, positions, weights.norm_eps)
    return ops.post_project(x, weights.norm, weights.norm_eps, weights.post_projection)


def _layer(layer: LayerWeights, kv: KVView, x: Tensor, positions: Tensor, eps: float) -> Tensor:
    q = ops.norm_linear(x, layer.input_norm, eps, layer.q_proj)
    q = q.unflatten(-1, (layer.num_qo_heads, layer.head_dim))  # [batch, rows, num_qo_heads, head_dim]
    attended = kv.attend(
        q,
        layer.sm_scale,
        q_norm_weight=layer.q_norm,
        q_norm_eps=eps,
        rope_inv_freq=layer.rope_inv_freq,
        positions=positions,
    )
    x = ops.linear_norm_add(attended.flatten(-2), layer.o_proj, layer.post_attention_norm, eps, x)
    inner = ops.norm_geglu(x, layer.pre_feedforward_norm, eps, layer.gate_up)  # [batch, rows, intermediate]
    return ops.linear_norm_add(inner, layer.down, layer.post_feedforward_norm, eps, x, scale=layer.layer_scalar)


def _head(
    weights: AssistantWeights, normed: Tensor, k: int, suppress_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if weights.centroids is None:
        return ops.lm_head_topk(normed, weights.lm_head, k, suppress_ids=suppress_ids)
    return ops.centroid_topk(
        normed,
        weights.centroids,
        weights.token_ordering,
        weights.lm_head,
        weights.num_active,
        k,
        centroid_ordered=weights.centroid_ordered,
        suppress_ids=suppress_ids,
    )


def _draft_chain(
    step: Step,
    seed_ids: Tensor,
    seed_state: Tensor,
    num_steps: int,
    num_draft_tokens: int | None,
    root_positions: Tensor | None,
) -> DraftTree:
    ids, state = seed_ids.unsqueeze(1), seed_state.unsqueeze(1)  # [batch, 1], [batch, 1, backbone]
    drafted, logprobs = [], []
    for _ in range(num_steps):
        found = step(ids, state, None)
        ids, state = found.token_ids[:, :, 0], found.state
        drafted.append(ids)
        logprobs.append(found.logprobs[:, :, 0])
    return chain_tree(seed_ids, torch.cat(drafted, dim=1), torch.cat(logprobs, dim=1), num_draft_tokens, root_positions)


def chain_tree(
    seed_ids: Tensor,
    cand_ids: Tensor,  # [batch, num_steps]
    logprobs: Tensor,  # the same
    num_draft_tokens: int | None,
    root_positions: Tensor | None,
) -> DraftTree:
    """The draft that the steps of a chain make."""
    cand_scores = logprobs.cumsum(dim=1)
    size = cand_ids.size(1) + 1 if num_draft_tokens is None else num_draft_tokens
    draft_ids = torch.cat([seed_ids.unsqueeze(1).long(), cand_ids[:, : size - 1]], dim=1)
    node = torch.arange(size, device=seed_ids.device)
    draft_positions = None if root_positions is None else root_positions.unsqueeze(1).long() + node
    return chain_links(draft_ids, draft_positions, cand_ids, cand_scores)


def chain_links(
    draft_ids: Tensor, draft_positions: Tensor | None, cand_ids: Tensor, cand_scores: Tensor
) -> DraftTree:
    """What tree_build gives for a chain, unranked: scores only fall along it, so its first nodes are the best."""
    (batch, size), device = draft_ids.shape, draft_ids.device
    node = torch.arange(size, device=device)
    first_child = torch.where(node + 1 < size, node + 1, -1)
    return DraftTree(
        draft_ids=draft_ids,
        draft_positions=draft_positions,
        parents=(node - 1).repeat(batch, 1),
        selected=node[: size - 1].repeat(batch, 1),
        tree_mask=(node.unsqueeze(1) >= node).repeat(batch, 1, 1),
        retrieve_index=torch.arange(batch * size, device=device).view(batch, size),
        retrieve_next_token=first_child.repeat(batch, 1),
        retrieve_next_sibling=torch.full((batch, size), -1, device=device),
        cand_ids=cand_ids,
        cand_scores=cand_scores,
    )


def _draft_tree(
    step: Step,
    seed_ids: Tensor,
    seed_state: Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int | None,
    root_positions: Tensor,
    suppress_ids: Tensor | None = None,
) -> DraftTree:
    ids, state = seed_ids.unsqueeze(1), seed_state.unsqueeze(1)
    row_index = scores = frontier = None
    all_ids: list[Tensor] = []
    all_scores: list[Tensor] = []
    all_parents: list[Tensor] = []
    offset = 0
    for _ in range(num_steps):
        found = step(ids, state, row_index)
        state = found.state
        ids, row_index, scores, frontier, cand_scores, cand_parent = ops.tree_expand(
            found.logprobs, found.token_ids, offset, scores=scores, frontier=frontier
        )
        all_ids.append(found.token_ids.flatten(1))  # [batch, rows * topk]
        all_scores.append(cand_scores)
        all_parents.append(cand_parent)
        offset += found.token_ids.size(1) * topk
    cand_ids, cand_scores = torch.cat(all_ids, dim=1), torch.cat(all_scores, dim=1)
    size = offset + 1 if num_draft_tokens is None else num_draft_tokens
    built = ops.tree_build(seed_ids, cand_scores, cand_ids, torch.cat(all_parents, dim=1), root_positions, size)
    return DraftTree._make((*built, cand_ids, cand_scores))


def check_draft(
    weights: AssistantWeights,
    kv: Mapping[str, KVView],
    seed_ids: Tensor,
    seed_state: Tensor,
    positions: Tensor,
    num_steps: int,
    topk: int,
    num_draft_tokens: int | None,
    root_positions: Tensor | None,
    suppress_ids: Tensor | None,
) -> None:
    """Raises ArgumentError for what draft() does not take."""
    check_shape("draft", "seed_ids", seed_ids, (None,))
    check_index("draft", "seed_ids", seed_ids)
    batch = seed_ids.size(0)
    # No message is formatted before it is needed: that would fix the batch size in a compiled draft.
    why = "the batch of seed_ids, the target's hidden size"
    check_shape("draft", "seed_state", seed_state, (batch, weights.backbone), why)
    check_shape("draft", "positions", positions, (batch,), "the batch of seed_ids")
    check_index("draft", "positions", positions)
    check_range("draft", "num_steps", num_steps, 1)
    check_range("draft", "topk", topk, 1, weights.num_candidates, "the head's candidates")
    if num_draft_tokens is not None:
        most = num_candidates(num_steps, topk) + 1
        check_range("draft", "num_draft_tokens", num_draft_tokens, 1, most, "root and candidates")
    if root_positions is not None:
        check_shape("draft", "root_positions", root_positions, (batch,), "the batch of seed_ids")
        check_index("draft", "root_positions", root_positions)
    elif topk > 1:
        fail("draft", "root_positions", "a tensor for topk > 1", None, "a tree's nodes have positions of the target")
    check_suppress_ids("draft", suppress_ids)
    check_device(
        "draft", weights.device, "weights", seed_ids=seed_ids, seed_state=seed_state, positions=positions,
        root_positions=root_positions, suppress_ids=suppress_ids,
    )
    for layer in weights.layers:
        _check_view(layer, kv, batch, weights)


def _check_view(layer: LayerWeights, kv: Mapping[str, KVView], batch: int, weights: AssistantWeights) -> None:
    name = f"kv[{layer.layer_type!r}]"
    if layer.layer_type not in kv:
        fail("draft", name, "a KVView for each layer type of the assistant", f"views for {sorted(kv)}")
    view = kv[layer.layer_type]
    if view.batch != batch:
        fail("draft", name, f"{batch} requests", view.batch, "the batch of seed_ids")
    if view.head_dim != layer.head_dim:
        fail("draft", name, f"head_dim {layer.head_dim}", view.head_dim)
    if layer.num_qo_heads % view.num_kv_heads != 0:
        fail("draft", name, f"a number of KV heads that divides {layer.num_qo_heads}", view.num_kv_heads)
    check_device("draft", weights.device, "weights", **{name: view.k_cache})
