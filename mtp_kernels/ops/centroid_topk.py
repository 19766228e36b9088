"""centroid_topk: the k best tokens of the best centroids."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.centroid_topk import centroid_topk as reference
from ._checks import check_range
from ._registry import Spec, cpp_kernel, register, triton_kernel
from .centroid_logits import check_head, check_head_contents, serves_cpu
from .centroid_logits import serves as serves_head

NAME = "centroid_topk"
SCHEMA = """centroid_topk(Tensor normed, Tensor centroid_weight, Tensor token_ordering, Tensor lm_head_weight,
    SymInt num_active, SymInt k, *, bool centroid_ordered=False, Tensor? suppress_ids=None) -> (Tensor logprobs,
    Tensor token_ids, Tensor logsumexp)"""


def centroid_topk(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    k: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best tokens of a centroid head, without a tensor of the vocabulary's size.

    The candidates of a row are the tokens of its num_active best centroids, with the logits of `centroid_logits`;
    logprobs = logits - logsumexp(logits) over the candidates of that row alone: no value outside them plays a part.
    The k best come first to last, the lowest token id wins a tie. A NaN logit counts as -inf and adds nothing to
    logsumexp; a row with nothing else gives its k lowest candidate ids with logprob -inf and logsumexp -inf. A logit
    of +inf has logprob 0, everything finite beside it -inf.

    Args:
        normed: [..., hidden], bf16, fp16 or fp32: the draft model's last hidden after its final norm.
        centroid_weight: [num_centroids, hidden], dtype of `normed`.
        token_ordering: [vocab] int32 or int64, the token ids sorted by centroid; vocab is a multiple of
            num_centroids. An entry outside the vocabulary is clamped to it.
        lm_head_weight: [vocab, hidden], dtype of `normed`; may be a slice of rows.
        num_active: centroids looked at, 1 to num_centroids (Gemma 4: 32 of 2048).
        k: 1 to num_active * vocab / num_centroids.
        centroid_ordered: lm_head_weight's rows are in token_ordering's order already (`reorder_lm_head` makes it);
            the results are the same bits.
        suppress_ids: [n] int32 or int64, tokens that must not be chosen: their logits count as -inf, in logsumexp
            too. One that is no candidate, as -1, changes nothing.

    Returns:
        logprobs [..., k] fp32 (at most 0), token_ids [..., k] int64, logsumexp [...] fp32 of the row's candidates.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device; k above the number of candidates.

    >>> normed, centroids = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    >>> head = torch.tensor([[5.0, 0.0], [6.0, 0.0], [5.0, 0.0], [8.0, 0.0]])
    >>> logprobs, token_ids, logsumexp = centroid_topk(normed, centroids, torch.tensor([1, 3, 2, 0]), head, 1, 2)
    >>> logprobs, token_ids
    (tensor([[-0.6931, -0.6931]]), tensor([[0, 2]]))
    """
    return torch.ops.mtp.centroid_topk(
        normed, centroid_weight, token_ordering, lm_head_weight, num_active, k, centroid_ordered=centroid_ordered,
        suppress_ids=suppress_ids,
    )


def check(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    k: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> None:
    check_head(NAME, normed, centroid_weight, token_ordering, lm_head_weight, num_active, suppress_ids)
    size = token_ordering.size(0) // centroid_weight.size(0)
    check_range(NAME, "k", k, 1, num_active * size, f"{num_active} active centroids of {size} tokens")


def outputs(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    k: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> tuple[Spec, ...]:
    rows = tuple(normed.shape[:-1])
    return ((*rows, k), torch.float32), ((*rows, k), torch.int64), (rows, torch.float32)


def contents(
    normed: Tensor,
    centroid_weight: Tensor,
    token_ordering: Tensor,
    lm_head_weight: Tensor,
    num_active: int,
    k: int,
    *,
    centroid_ordered: bool = False,
    suppress_ids: Tensor | None = None,
) -> None:
    check_head_contents(NAME, normed, centroid_weight, token_ordering, lm_head_weight, suppress_ids)


def serves(
    normed: Tensor, centroid_weight: Tensor, token_ordering: Tensor, lm_head_weight: Tensor, num_active: int, k: int,
    *, suppress_ids: Tensor | None = None, **options: object
) -> str:
    """Why the Triton kernels do not serve these arguments, or ""."""
    pieces = -(-token_ordering.size(0) // centroid_weight.size(0) // 64)  # one program each; the last one holds all
    if num_active * pieces * min(k, 64) > 2**14:
        return f"{num_active} active centroids in {pieces} pieces each, and k = {k}: their product is above 2^14"
    return serves_head(normed, centroid_weight, token_ordering, suppress_ids=suppress_ids)


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME, serves_cpu)))
