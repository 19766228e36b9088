"""A draft step of an assistant with a dense head (12B, 26B-A4B, 31B) on private kernels, for few rows.

Each starts early and has its weights on the way before its rows are there (triton_ops/_dense_round_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ._cuda_launch import CudaLaunch
from .triton_ops import _dense_round, lm_head_topk
from .triton_ops._dense_round import MOST_HIDDEN
from .triton_ops._launch import Launch
from .triton_ops._prefetch import can_prefetch
from .weights import AssistantWeights, LayerWeights

__all__ = ["MOST_HIDDEN", "MOST_ROWS", "overlap", "step"]

# Rows up to which these kernels beat the ops, of 31B at least; 8 at most, a tile's rows and the candidates of one pass
# of the head. Microseconds of a 31B step on an H200, ops and these, each pair in one run: batch 1, 2 and 4 (1024 keys)
# 354 and 333, 371 and 346, 436 and 408; batch 8 (8192) 594 and 578; batch 64 (4096), with another tile, 1748 and 2394.
MOST_ROWS = 8
Emit = Callable[[Launch | CudaLaunch], None]
Attend = Callable[[LayerWeights, Tensor], Tensor]  # launches the attention of a layer's queries
PARTS = ("part_values", "part_orders", "part_max", "part_sum")


def step(
    weights: AssistantWeights, batch: int, rows: int, state: Tensor, source: dict[str, Any], depth: int, early: bool,
    attend: Attend, emit: Emit
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(normed [batch * rows, hidden], state [batch, rows, backbone], the head's lists of its best `depth` candidates).

    `source` says which tokens and states, as pre() takes it.
    """
    total, eps = batch * rows, weights.norm_eps
    hold = _dense_round.holds([layer.q_proj for layer in weights.layers])
    assert total <= _dense_round.MOST_ROWS, "more rows than a tile has"

    def empty(columns: int) -> Tensor:
        return state.new_empty((total, columns))

    launch, pending = _dense_round.pre(
        weights.pre_projection, weights.embed_weight, weights.embed_scale, state, total, early=early, **source
    )
    emit(launch)
    x: Tensor | None
    x, normed = empty(weights.hidden), empty(weights.hidden)
    emit(_dense_round.settle(pending, x, weights.layers[0].input_norm, eps, normed, early=early))
    for layer, following in zip(weights.layers, (*weights.layers[1:], None)):
        q = state.new_empty((batch, rows, layer.num_qo_heads, layer.head_dim))
        emit(_dense_round.linear(normed, layer.q_proj, q.view(total, -1), hold=hold, early=early))
        attended = attend(layer, q).view(total, -1)
        launch, pending = _dense_round.split_linear(attended, layer.o_proj, hold=False, early=early)
        emit(launch)
        assert x is not None
        pending = pending.after(x, layer.post_attention_norm)
        x, normed = empty(weights.hidden), empty(weights.hidden)
        emit(_dense_round.settle(pending, x, layer.pre_feedforward_norm, eps, normed, early=early))
        inner = empty(layer.down.size(1))
        emit(_dense_round.linear(normed, layer.gate_up, inner, hold=hold, gated=True, early=early))
        launch, pending = _dense_round.split_linear(inner, layer.down, hold=hold, early=early)
        emit(launch)
        pending = pending.after(x, layer.post_feedforward_norm, layer.layer_scalar)
        x, normed = None if following is None else empty(weights.hidden), empty(weights.hidden)
        norm = weights.norm if following is None else following.input_norm
        emit(_dense_round.settle(pending, x, norm, eps, normed, early=early))
    after = state.new_empty((batch, rows, weights.backbone))
    emit(_dense_round.linear(normed, weights.post_projection, after.view(total, -1), hold=True, early=early))
    return normed, after, _head(normed, weights.lm_head, depth, early, emit)


def _head(normed: Tensor, weight: Tensor, depth: int, early: bool, emit: Emit) -> dict[str, Tensor]:
    """lm_head_topk without its merge; the orders have the token id in their upper half, as the centroid head's."""
    (stream, _), _ = lm_head_topk.plan(normed, weight, depth)
    stream = replace(stream, constants={**stream.constants, "PACKED": True})
    emit(overlap(stream, early, weight))
    return {name: stream.args[name] for name in PARTS}


def overlap(launch: Launch | CudaLaunch, early: bool, *read: Tensor) -> Launch | CudaLaunch:
    """A launch of an op's kernel that starts early and asks for what it reads first.

    Not an attention whose programs fold their chunks: there are more than an SM has room for, so that few would start
    early, and they have no registers left. Nor one that loads its first keys before it waits.
    """
    launch = launch.with_early(early)
    if isinstance(launch, CudaLaunch) or "PREFETCH" not in launch.constants:
        return launch
    constants = launch.constants
    loads = constants.get("CHUNKS", 1) == 1 and not constants.get("ONE_TILE") and not constants.get("LATE")
    return replace(launch, constants={**constants, "PREFETCH": early and loads and can_prefetch(*read)})
