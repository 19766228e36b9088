"""pre_project: the entry of a draft step, from token embeddings and the recurrent state to the drafter's width."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.pre_project import embed
from ..reference.pre_project import pre_project as reference
from ._checks import (
    check_device,
    check_float,
    check_index,
    check_last_contiguous,
    check_range,
    check_rank,
    check_shape,
    fail,
)
from ._contents import check_contents, check_contents_finite, check_contents_range
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "pre_project"
SCHEMA = (
    "pre_project(Tensor token_ids, Tensor embed_weight, float embed_scale, Tensor? state, Tensor weight, *, "
    "Tensor? row_index=None, SymInt vocab_start=0) -> Tensor"
)


def pre_project(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> Tensor:
    """y = concat(round(embed_weight[id - vocab_start] * embed_scale), state[row]) @ weight.T.

    Args:
        token_ids: [batch, rows], int32 or int64. An id that this shard of the vocabulary does not hold, and any id
            out of range, contributes a zero embedding.
        embed_weight: [vocab_shard, backbone], bf16, fp16 or fp32: the target's embedding, or this rank's rows of it.
        embed_scale: used as given, in fp32; the product is rounded once to the embedding's dtype. A model that rounds
            its scale (Gemma 4 keeps it in the embedding's dtype) passes the rounded value.
        state: [batch, prev_rows, backbone], dtype of `embed_weight`: the recurrent vectors; or None for the embedding
            half alone. With tensor parallelism one rank passes the state, then all add up their results.
        weight: [hidden, 2 * backbone] as nn.Linear has it, dtype of `embed_weight`; also when `state` is None.
        row_index: [batch, rows], int32 or int64: the row of `state`, within the request, that each row grows from,
            clamped to 0..prev_rows - 1. None: row r grows from row r, and prev_rows == rows. Unused without `state`.
        vocab_start: id of the first row of `embed_weight`.

    Returns:
        [batch, rows, hidden], dtype of `embed_weight`; accumulated in fp32 and rounded once.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device; a negative vocab_start.

    >>> embed_weight, weight = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 10.0]])
    >>> pre_project(torch.tensor([[1]]), embed_weight, 0.5, torch.tensor([[[3.0]]]), weight)
    tensor([[[31.]]])
    """
    return torch.ops.mtp.pre_project(
        token_ids, embed_weight, embed_scale, state, weight, row_index=row_index, vocab_start=vocab_start
    )


def check(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> None:
    check_rank(NAME, "token_ids", token_ids, 2)
    check_index(NAME, "token_ids", token_ids)
    batch, rows = token_ids.shape
    check_rank(NAME, "embed_weight", embed_weight, 2)
    check_float(NAME, "embed_weight", embed_weight)
    backbone = embed_weight.size(1)
    check_shape(NAME, "weight", weight, (None, 2 * backbone), f"embed_weight has {backbone} columns")
    check_float(NAME, "weight", weight, embed_weight, "embed_weight")
    if row_index is not None:
        check_shape(NAME, "row_index", row_index, (batch, rows), f"token_ids is [{batch}, {rows}]")
        check_index(NAME, "row_index", row_index)
    if state is not None:
        why = f"token_ids is [{batch}, {rows}], embed_weight has {backbone} columns"
        check_shape(NAME, "state", state, (batch, rows if row_index is None else None, backbone), why)
        check_float(NAME, "state", state, embed_weight, "embed_weight")
        if state.size(1) == 0 and rows > 0:
            fail(NAME, "state", "at least 1 row a request", 0, "row_index has to name one")
    check_range(NAME, "vocab_start", vocab_start, 0)
    check_last_contiguous(NAME, token_ids=token_ids, embed_weight=embed_weight, state=state, weight=weight,
                          row_index=row_index)
    check_device(NAME, token_ids.device, "token_ids", embed_weight=embed_weight, state=state, weight=weight,
                 row_index=row_index)


def outputs(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> Spec:
    return (*token_ids.shape, weight.size(0)), embed_weight.dtype


def contents(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> None:
    # A shard does not know where the vocabulary ends, so only a negative id is surely wrong.
    check_contents(NAME, "token_ids", token_ids, token_ids < 0, "at least 0")
    rows, present = embed(token_ids, embed_weight, embed_scale, vocab_start)
    unusable = present & ~torch.isfinite(rows).all(-1)
    check_contents(NAME, "token_ids", token_ids, unusable, "an id whose scaled embedding is finite")
    if state is not None:
        check_contents_range(NAME, "row_index", row_index, 0, state.size(1) - 1, f"state has {state.size(1)} rows")
    check_contents_finite(NAME, state=state, weight=weight)


def serves(
    token_ids: Tensor,
    embed_weight: Tensor,
    embed_scale: float,
    state: Tensor | None,
    weight: Tensor,
    *,
    row_index: Tensor | None = None,
    vocab_start: int = 0,
) -> str:
    """Why the Triton kernel does not serve these arguments, or ""."""
    return "embed_weight has no columns" if embed_weight.size(1) == 0 else ""


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)))
