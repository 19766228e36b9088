"""centroid_logits: the logits of the tokens of the best centroids."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.centroid_logits import centroid_logits as reference
from ._checks import (
    check_device,
    check_float,
    check_index,
    check_last_contiguous,
    check_min_rank,
    check_range,
    check_rank,
    check_shape,
    require,
)
from ._contents import check_contents_finite, check_contents_range
from ._registry import Spec, cpp_kernel, register, triton_kernel
from ._suppress import check_suppress_contents, check_suppress_ids, too_many_suppressed

NAME = "centroid_logits"
SCHEMA = """centroid_logits(Tensor normed, Tensor centroid_weight, Tensor token_ordering, Tensor lm_head_weight,
    SymInt num_active, *, bool centroid_ordered=False, Tensor? suppress_ids=None) -> (Tensor logits,
    Tensor token_ids)"""


def centroid_logits(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and ids of a row's candidates: the tokens of its num_active best centroids.

    scores = normed @ centroid_weight.T; each of the num_centroids centroids owns vocab / num_centroids tokens,
    token_ordering.view(num_centroids, -1)[centroid]; logits = normed @ lm_head_weight[tokens].T. Centroids are ranked
    by score (NaN counts as -inf, the lower centroid wins a tie). These are the values that `centroid_topk` ranks, for
    callers who sample or mask on their own.

    Args:
        normed: [..., hidden], bf16, fp16 or fp32: the draft model's last hidden after its final norm.
        centroid_weight: [num_centroids, hidden], dtype of `normed`.
        token_ordering: [vocab] int32 or int64, the token ids sorted by centroid; vocab is a multiple of
            num_centroids. An entry outside the vocabulary is clamped to it.
        lm_head_weight: [vocab, hidden], dtype of `normed`; may be a slice of rows.
        num_active: centroids looked at, 1 to num_centroids.
        centroid_ordered: lm_head_weight's rows are in token_ordering's order already (`reorder_lm_head` makes it);
            the results are the same bits.
        suppress_ids: [n] int32 or int64, tokens that must not be chosen: their logits are -inf. One that
            is no candidate, as -1, changes nothing.

    Returns:
        logits [..., num_active * vocab / num_centroids] fp32 and token_ids int64 of the same shape. The order: the
        best centroid's tokens first, within a centroid as token_ordering lists them.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device.

    >>> normed, centroids = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    >>> head = torch.tensor([[5.0, 0.0], [6.0, 0.0], [7.0, 0.0], [8.0, 0.0]])
    >>> centroid_logits(normed, centroids, torch.tensor([1, 3, 2, 0]), head, 1)
    (tensor([[7., 5.]]), tensor([[2, 0]]))
    """
    return torch.ops.mtp.centroid_logits(
        normed, centroid_weight, token_ordering, lm_head_weight, num_active, centroid_ordered=centroid_ordered,
        suppress_ids=suppress_ids,
    )


def check(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> None:
    check_head(NAME, normed, centroid_weight, token_ordering, lm_head_weight, num_active, suppress_ids)


def check_head(
    op: str, normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, lm_head_weight: Tensor, num_active: int,
    suppress_ids: Tensor | None,
) -> None:
    """The checks of a centroid head's arguments, for `centroid_topk` too."""
    check_min_rank(op, "normed", normed, 1)
    check_float(op, "normed", normed)
    why = f"normed has {normed.size(-1)} columns"
    check_shape(op, "centroid_weight", centroid_weight, (None, normed.size(-1)), why)
    check_float(op, "centroid_weight", centroid_weight, normed, "normed")
    num_centroids = centroid_weight.size(0)
    check_range(op, "num_active", num_active, 1, num_centroids, f"centroid_weight has {num_centroids} rows")
    check_rank(op, "token_ordering", token_ordering, 1)
    check_index(op, "token_ordering", token_ordering)
    vocab = token_ordering.size(0)
    require(
        vocab > 0 and vocab % num_centroids == 0,
        op,
        "token_ordering",
        f"a multiple of {num_centroids} entries",
        vocab,
        f"centroid_weight has {num_centroids} rows",
    )
    check_shape(op, "lm_head_weight", lm_head_weight, (vocab, normed.size(-1)), f"token_ordering has {vocab}, {why}")
    check_float(op, "lm_head_weight", lm_head_weight, normed, "normed")
    tensors = {
        "centroid_weight": centroid_weight,
        "token_ordering": token_ordering,
        "lm_head_weight": lm_head_weight,
    }
    check_last_contiguous(op, normed=normed, **tensors)
    check_suppress_ids(op, suppress_ids)
    check_device(op, normed.device, "normed", **tensors, suppress_ids=suppress_ids)


def outputs(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[Spec, ...]:
    shape = (*normed.shape[:-1], num_active * (token_ordering.size(0) // centroid_weight.size(0)))
    return (shape, torch.float32), (shape, torch.int64)


def contents(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> None:
    check_head_contents(NAME, normed, centroid_weight, token_ordering, lm_head_weight, suppress_ids)


def check_head_contents(
    op: str, normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, lm_head_weight: Tensor,
    suppress_ids: Tensor | None,
) -> None:
    vocab = lm_head_weight.size(0)
    check_contents_range(op, "token_ordering", token_ordering, 0, vocab - 1, f"lm_head_weight has {vocab} rows")
    check_suppress_contents(op, suppress_ids, vocab)
    check_contents_finite(op, normed=normed, centroid_weight=centroid_weight, lm_head_weight=lm_head_weight)


def serves(
    normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, *args: object, suppress_ids: Tensor | None = None,
    **options: object
) -> str:
    """Why the Triton kernels do not serve these arguments, or "": those of `centroid_topk` too."""
    if normed.dim() > 4:
        return f"normed has {normed.dim() - 1} leading dimensions, more than 3"
    if centroid_weight.size(0) > 2**13:
        return f"{centroid_weight.size(0)} centroids, more than 2^13"  # whose scores a program has in its registers
    if token_ordering.size(0) >= 2**31:
        return f"a vocabulary of {token_ordering.size(0)}, more than 2^31 - 1"
    return "normed has no columns" if normed.size(-1) == 0 else too_many_suppressed(suppress_ids)


def serves_cpu(normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, *args: object, **options: object
               ) -> str:
    """Why the C++ kernel does not serve these arguments, or "": those of `centroid_topk` too."""
    vocab = token_ordering.size(0)
    return f"a vocabulary of {vocab}, more than 2^32 - 1" if vocab >= 2**32 else ""


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME, serves_cpu)))
