"""tree_expand: the candidates of one draft step, and the best of them as the next frontier."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.tree_expand import tree_expand as reference
from ._checks import (
    check_device,
    check_dtype,
    check_index,
    check_last_contiguous,
    check_range,
    check_rank,
    check_shape,
    fail,
    require,
    show_shape,
)
from ._contents import check_contents, check_contents_range
from ._registry import Spec, cpp_kernel, register, triton_kernel

NAME = "tree_expand"
MAX_CANDIDATES = 4096  # a request, of the Triton kernel, which compares all of them in pairs
SCHEMA = """tree_expand(Tensor logprobs, Tensor token_ids, SymInt cand_offset, *, Tensor? scores=None,
    Tensor? frontier=None) -> (Tensor next_ids, Tensor row_index, Tensor next_scores, Tensor next_frontier,
    Tensor cand_scores, Tensor cand_parent)"""


def tree_expand(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every row of the frontier grows k candidates; the k best of all of them are the next frontier.

    Candidate j = row * k + column of this step (the order of `token_ids.flatten(1)`) has the global index
    cand_offset + j, the score scores[row] + logprobs[row, column], added in fp32, and the parent frontier[row].
    A score that is NaN, or becomes NaN by the addition, becomes -inf, so that no result holds a NaN.
    The best have the highest scores; -0.0 equals 0.0, and the lowest index wins a tie. Where rows have nothing but
    -inf, those are the lowest indices. Token ids and frontier entries are passed on as they are, in range or not.

    Args:
        logprobs: [batch, rows, k] fp32, at least 1 row and k >= 1.
        token_ids: [batch, rows, k] int32 or int64, the token of each logprob.
        cand_offset: number of candidates of all earlier steps, 0 in the first.
        scores: [batch, rows] fp32, `next_scores` of the last step; None in the first step, where rows is 1: 0.
        frontier: [batch, rows] int32 or int64, `next_frontier` of the last step; None with `scores`: -1, the root.

    Returns:
        next_ids [batch, k] int64, the tokens of the next frontier, best first; row_index [batch, k] int64, the row of
        this step that each grew from; next_scores [batch, k] fp32; next_frontier [batch, k] int64, their global
        indices; cand_scores [batch, rows * k] fp32; cand_parent [batch, rows * k] int64, the global index of the
        candidate that each candidate grew from, -1 for the root.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device; only one of `scores` and `frontier`.

    >>> logprobs, token_ids = torch.tensor([[[-1.0, -2.0]]]), torch.tensor([[[7, 8]]])
    >>> next_ids, row_index, next_scores, next_frontier, cand_scores, cand_parent = tree_expand(logprobs, token_ids, 0)
    >>> next_ids, next_frontier, cand_parent
    (tensor([[7, 8]]), tensor([[0, 1]]), tensor([[-1, -1]]))
    >>> logprobs, token_ids = torch.tensor([[[-3.0, -4.0], [-0.5, -2.5]]]), torch.tensor([[[1, 2], [3, 4]]])
    >>> next_ids, row_index, next_scores, next_frontier, cand_scores, cand_parent = tree_expand(
    ...     logprobs, token_ids, 2, scores=next_scores, frontier=next_frontier)
    >>> next_ids, row_index, next_scores
    (tensor([[3, 1]]), tensor([[1, 0]]), tensor([[-2.5000, -4.0000]]))
    >>> next_frontier, cand_parent
    (tensor([[4, 2]]), tensor([[0, 0, 1, 1]]))
    """
    return torch.ops.mtp.tree_expand(logprobs, token_ids, cand_offset, scores=scores, frontier=frontier)


def check(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> None:
    check_rank(NAME, "logprobs", logprobs, 3)
    check_dtype(NAME, "logprobs", logprobs, (torch.float32,))
    batch, rows, k = logprobs.shape
    why = f"logprobs is {show_shape(logprobs.shape)}"
    require(rows >= 1 and k >= 1, NAME, "logprobs", "at least 1 row and 1 column", show_shape(logprobs.shape))
    check_shape(NAME, "token_ids", token_ids, (batch, rows, k), why)
    check_index(NAME, "token_ids", token_ids)
    check_range(NAME, "cand_offset", cand_offset, 0)
    if scores is not None and frontier is not None:
        check_shape(NAME, "scores", scores, (batch, rows), why)
        check_dtype(NAME, "scores", scores, (torch.float32,))
        check_shape(NAME, "frontier", frontier, (batch, rows), why)
        check_index(NAME, "frontier", frontier)
    elif scores is not None:
        fail(NAME, "frontier", "a tensor", None, "scores is given")
    elif frontier is not None:
        fail(NAME, "scores", "a tensor", None, "frontier is given")
    elif rows != 1:
        fail(NAME, "scores", "a tensor", None, f"logprobs has {rows} rows, the first step has 1")
    check_last_contiguous(NAME, logprobs=logprobs, token_ids=token_ids, scores=scores, frontier=frontier)
    check_device(NAME, logprobs.device, "logprobs", token_ids=token_ids, scores=scores, frontier=frontier)


def outputs(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> tuple[Spec, ...]:
    batch, rows, k = logprobs.shape
    ids, values = ((batch, k), torch.int64), ((batch, k), torch.float32)
    return ids, ids, values, ids, ((batch, rows * k), torch.float32), ((batch, rows * k), torch.int64)


def contents(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> None:
    check_contents(NAME, "logprobs", logprobs, ~(logprobs <= 0), "at most 0")
    check_contents(NAME, "token_ids", token_ids, token_ids < 0, "a token id of at least 0")
    if scores is not None:
        check_contents(NAME, "scores", scores, ~(scores <= 0), "at most 0")
    check_contents_range(NAME, "frontier", frontier, -1, cand_offset - 1, f"cand_offset is {cand_offset}")


def serves(
    logprobs: Tensor, token_ids: Tensor, cand_offset: int, *, scores: Tensor | None = None,
    frontier: Tensor | None = None
) -> str:
    """Why the Triton kernel does not take these arguments; "" if it does."""
    candidates = logprobs.size(1) * logprobs.size(2)
    return "" if candidates <= MAX_CANDIDATES else f"{candidates} candidates a request: at most {MAX_CANDIDATES}"


register(
    SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
    kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME)),
)
