"""Checks of whole draft steps and rounds: every drafted token, score and state against the references in fp64.

A candidate's own tokens are fed back (its state is not), so that one pick among near-equal tokens does not make
everything after it differ. Requests are looked at a few at a time: in fp64 a large batch's caches would not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..draft import DraftTree, num_candidates
from ..kv_view import KVView
from ..reference.draft_attention import draft_attention
from ..reference.linear_norm_add import linear_norm_add
from ..reference.norm_geglu import norm_geglu
from ..reference.norm_linear import norm_linear
from ..reference.post_project import post_project
from ..reference.pre_project import embed, pre_project
from ..reference.tree_build import tree_build
from ..reference.tree_expand import tree_expand
from ..weights import AssistantWeights, LayerWeights
from . import plain
from .checks import HeadOracle, Verdict, check_exact, check_floats
from .inputs import take_pages
from .ops.draft_attention import naive

AT_ONCE = 8  # requests


class Chain:
    """The same requests' recurrence twice, in fp64 by the references and in plain PyTorch, fed with given tokens."""

    def __init__(
        self, weights: AssistantWeights, kv: Mapping[str, KVView], state: Tensor, positions: Tensor, context: int
    ) -> None:
        self.weights, self.positions = weights, positions
        self.kv = {name: _in_fp64(view) for name, view in kv.items()}
        self.attends = [plain.attention(kv[layer.layer_type], context, naive) for layer in weights.layers]
        self.rotation = plain.rotations(weights, positions)
        self.exact, self.naive = state.double().unsqueeze(1), state.unsqueeze(1)  # [batch, rows, backbone]

    def advance(self, token_ids: Tensor, row_index: Tensor | None = None) -> HeadOracle:
        """One step of token_ids [batch, rows], each grown from row `row_index` of the last step; its head's oracle."""
        if row_index is not None:
            index = row_index.unsqueeze(-1)
            self.exact, self.naive = (torch.take_along_dim(s, index, 1) for s in (self.exact, self.naive))
        weights = self.weights
        normed, self.exact = _exact_step(weights, self.kv, token_ids, self.exact, self.positions)
        _, self.naive, naive_normed = plain.step(weights, self.attends, self.rotation, token_ids, self.naive)
        head = (weights.lm_head, weights.centroids, weights.token_ordering, weights.num_active)
        return HeadOracle(normed.flatten(0, 1), naive_normed.flatten(0, 1), *head, weights.centroid_ordered)


def check_steps(
    weights: AssistantWeights, kv: Mapping[str, KVView], seed_ids: Tensor, state: Tensor, positions: Tensor,
    context: int, ids: Sequence[Tensor], states: Sequence[Tensor],
) -> Verdict:
    """A chain's ids [batch] and states [batch, backbone], one of each a step."""
    verdict = Verdict()
    for part, some in _parts(kv, seed_ids.size(0)):
        chain = Chain(weights, some, state[part], positions[part], context)
        token = seed_ids[part]
        for step_ids, step_state in zip(ids, states):
            head = chain.advance(token.unsqueeze(1))
            got = [step_state[part].unsqueeze(1)]
            verdict = verdict.worse(check_floats(got, [chain.exact], [chain.naive]))
            token = step_ids[part]
            verdict = verdict.worse(head.check(token.unsqueeze(1)))
            if verdict.why:
                return verdict  # a token that is none cannot be fed back
    return verdict


def check_round(
    weights: AssistantWeights, kv: Mapping[str, KVView], seed_ids: Tensor, state: Tensor, positions: Tensor,
    context: int, tree: DraftTree, num_steps: int, topk: int, nodes: int,
) -> Verdict:
    """Every candidate of a round: its token, its score, and that the next frontier grows from the best of them.

    The drafted tree follows from the candidates without rounding, so it is exactly the reference's. Its root has the
    position of the queries.
    """
    shape = (seed_ids.size(0), num_candidates(num_steps, topk))
    for name, tensor in (("cand_ids", tree.cand_ids), ("cand_scores", tree.cand_scores)):
        if tensor.shape != shape:
            return Verdict(why=f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
    verdict, all_parents = Verdict(), []
    for part, some in _parts(kv, seed_ids.size(0)):
        chain = Chain(weights, some, state[part], positions[part], context)
        token, row_index = seed_ids[part].unsqueeze(1), None
        parent_scores = torch.zeros_like(token, dtype=torch.float32)
        frontier = torch.full_like(token, -1)
        offset, parents = 0, []
        for _ in range(num_steps):
            head = chain.advance(token, row_index)
            rows = token.size(1)
            width = slice(offset, offset + rows * topk)
            ids = tree.cand_ids[part, width].unflatten(1, (rows, topk))  # [batch, rows, topk]
            scores = tree.cand_scores[part, width].unflatten(1, (rows, topk))
            logprobs = scores - parent_scores.unsqueeze(-1)
            flat = (ids.flatten(0, 1), logprobs.flatten(0, 1))
            verdict = verdict.worse(head.check(*flat, sums=scores.flatten(0, 1)))
            if verdict.why:
                return verdict  # a token that is none cannot be fed back
            none = torch.zeros_like(parent_scores)  # the scores are sums already
            expanded = tree_expand(scores, ids, offset, scores=none, frontier=frontier)
            token, row_index, parent_scores, frontier, _, parent = expanded
            parents.append(parent)
            offset += rows * topk
        all_parents.append(torch.cat(parents, 1))
    built = tree_build(seed_ids, tree.cand_scores, tree.cand_ids, torch.cat(all_parents), positions, nodes)
    return verdict.worse(check_exact(tree[: len(built)], built, DraftTree._fields))


def _exact_step(
    weights: AssistantWeights, kv: Mapping[str, KVView], token_ids: Tensor, state: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """(normed, state) in fp64; only the embedding's product is rounded, as its definition has it."""
    rows, _ = embed(token_ids, weights.embed_weight, weights.embed_scale, 0)  # [batch, rows, backbone]
    local = torch.arange(token_ids.numel(), device=token_ids.device).view(token_ids.shape)
    x = pre_project(local, rows.double().flatten(0, 1), 1.0, state, weights.pre_projection.double())
    for layer in weights.layers:
        x = _exact_layer(_layer_in_fp64(layer), kv[layer.layer_type], x, positions, weights.norm_eps)
    return post_project(x, weights.norm.double(), weights.norm_eps, weights.post_projection.double())


def _exact_layer(layer: LayerWeights, kv: KVView, x: Tensor, positions: Tensor, eps: float) -> Tensor:
    q = norm_linear(x, layer.input_norm, eps, layer.q_proj).unflatten(-1, (layer.num_qo_heads, layer.head_dim))
    attended = draft_attention(
        q, kv.k_cache, kv.v_cache, kv.block_table, kv.seq_lens, layer.sm_scale, window_left=kv.window_left,
        k_scale=kv.k_scale, v_scale=kv.v_scale, q_norm_weight=layer.q_norm, q_norm_eps=eps,
        rope_inv_freq=layer.rope_inv_freq, positions=positions,
    )
    x = linear_norm_add(attended.flatten(-2), layer.o_proj, layer.post_attention_norm, eps, x)
    inner = norm_geglu(x, layer.pre_feedforward_norm, eps, layer.gate_up)
    return linear_norm_add(inner, layer.down, layer.post_feedforward_norm, eps, x, scale=layer.layer_scalar)


def _layer_in_fp64(layer: LayerWeights) -> LayerWeights:
    names = [n for n, v in vars(layer).items() if isinstance(v, Tensor) and n != "rope_inv_freq"]
    return replace(layer, **{n: getattr(layer, n).double() for n in names})


def _parts(kv: Mapping[str, KVView], batch: int) -> Iterator[tuple[slice, dict[str, KVView]]]:
    for start in range(0, batch, AT_ONCE):
        part = slice(start, min(start + AT_ONCE, batch))
        yield part, {name: _some(view, part) for name, view in kv.items()}


def _some(view: KVView, part: slice) -> KVView:
    return replace(view, block_table=view.block_table[part], seq_lens=view.seq_lens[part])


def _in_fp64(view: KVView) -> KVView:
    """The pages of these requests alone, in fp64, in the order of the table."""
    pages = view.block_table.long().flatten()
    table = torch.arange(pages.numel(), device=pages.device).view(view.block_table.shape)
    k, v = (take_pages(cache, pages).double() for cache in (view.k_cache, view.v_cache))
    return replace(view, k_cache=k, v_cache=v, block_table=table)
