"""lm_head_topk: the k best tokens of a dense head, or of a shard of one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..reference.lm_head_topk import lm_head_topk as reference
from ._checks import (
    FP8,
    check_device,
    check_dtype,
    check_float,
    check_index,
    check_last_contiguous,
    check_min_rank,
    check_range,
    check_shape,
    fail,
    require,
    show_dtypes,
    show_shape,
)
from ._contents import check_contents, check_contents_finite
from ._registry import Spec, cpp_kernel, register, triton_kernel
from ._suppress import check_suppress_contents, check_suppress_ids, too_many_suppressed

NAME = "lm_head_topk"
SCHEMA = """lm_head_topk(Tensor normed, Tensor weight, SymInt k, *, Tensor? weight_scale=None, Tensor? token_map=None,
    SymInt vocab_start=0, float logits_soft_cap=0.0, Tensor? suppress_ids=None) -> (Tensor logprobs, Tensor token_ids,
    Tensor logsumexp)"""


def lm_head_topk(
    normed: Tensor,
    weight: Tensor,
    k: int,
    *,
    weight_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    vocab_start: int = 0,
    logits_soft_cap: float = 0.0,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best tokens of a dense head, without a tensor of logits.

    logits = normed @ weight.T (times weight_scale, one factor a row of the weight); with a soft cap c they become
    c * tanh(logits / c); logprobs = logits - logsumexp(logits) over the rows of this weight. The k best come first to
    last, the lowest token id wins a tie. A NaN logit counts as -inf and adds nothing to logsumexp; a row with nothing
    else gives its k lowest ids with logprob -inf and logsumexp -inf. A logit of +inf has logprob 0, everything finite
    beside it -inf.

    Shards of one head merge exactly: `merge_topk` does it from each rank's three results.

    Args:
        normed: [..., hidden], bf16, fp16 or fp32: the draft model's last hidden after its final norm.
        weight: [rows, hidden], dtype of `normed` or float8_e4m3fn; may be a slice of rows.
        k: 1 to rows.
        weight_scale: [rows] fp32, required with an fp8 weight and refused without one (`quantize_lm_head` makes both).
        token_map: [rows] int32 or int64, the token id of each row of a reduced vocabulary. It names ids of the whole
            vocabulary, so vocab_start must be 0 beside it.
        vocab_start: the token id of the first row of this shard.
        logits_soft_cap: 0 for none.
        suppress_ids: [n] int32 or int64, tokens that must not be chosen: their logits count as -inf, in logsumexp too.
            Ids of the whole vocabulary, as the results name them; one that is not here, as -1, changes nothing.

    Returns:
        logprobs [..., k] fp32 (at most 0), token_ids [..., k] int64, logsumexp [...] fp32 of the rows of `weight`.

    Raises:
        ArgumentError: a wrong rank, size, dtype, stride or device; k above the number of rows; a missing scale.

    >>> head = torch.tensor([[1.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    >>> logprobs, token_ids, logsumexp = lm_head_topk(torch.tensor([[1.0, 0.0]]), head, 2, vocab_start=100)
    >>> logprobs, token_ids
    (tensor([[-0.7586, -0.7586]]), tensor([[101, 102]]))
    """
    return torch.ops.mtp.lm_head_topk(
        normed,
        weight,
        k,
        weight_scale=weight_scale,
        token_map=token_map,
        vocab_start=vocab_start,
        logits_soft_cap=logits_soft_cap,
        suppress_ids=suppress_ids,
    )


def check(
    normed: Tensor,
    weight: Tensor,
    k: int,
    *,
    weight_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    vocab_start: int = 0,
    logits_soft_cap: float = 0.0,
    suppress_ids: Tensor | None = None,
) -> None:
    check_min_rank(NAME, "normed", normed, 1)
    check_float(NAME, "normed", normed)
    check_shape(NAME, "weight", weight, (None, normed.size(-1)), f"normed has {normed.size(-1)} columns")
    check_dtype(NAME, "weight", weight, (normed.dtype, *FP8), f"normed is {show_dtypes([normed.dtype])}")
    _check_scale(weight, weight_scale)
    rows, why = weight.size(0), f"weight has {weight.size(0)} rows"
    check_range(NAME, "k", k, 1, rows, why)
    check_range(NAME, "vocab_start", vocab_start, 0)
    if token_map is not None:
        check_shape(NAME, "token_map", token_map, (rows,), why)
        check_index(NAME, "token_map", token_map)
        require(vocab_start == 0, NAME, "vocab_start", 0, vocab_start, "token_map names the ids")
    require(0 <= logits_soft_cap < math.inf, NAME, "logits_soft_cap", "0 or a positive number", logits_soft_cap)
    check_last_contiguous(NAME, normed=normed, weight=weight, weight_scale=weight_scale, token_map=token_map)
    check_suppress_ids(NAME, suppress_ids)
    check_device(NAME, normed.device, "normed", weight=weight, weight_scale=weight_scale, token_map=token_map,
                 suppress_ids=suppress_ids)


def _check_scale(weight: Tensor, weight_scale: Tensor | None) -> None:
    why = f"weight is {show_dtypes([weight.dtype])}"
    if weight.dtype in FP8:
        if weight_scale is None:
            fail(NAME, "weight_scale", f"{show_shape([weight.size(0)])} float32", None, why)
        else:
            check_shape(NAME, "weight_scale", weight_scale, (weight.size(0),), f"weight has {weight.size(0)} rows")
            check_dtype(NAME, "weight_scale", weight_scale, (torch.float32,))
    elif weight_scale is not None:
        fail(NAME, "weight_scale", None, show_shape(weight_scale.shape), why)


def outputs(
    normed: Tensor,
    weight: Tensor,
    k: int,
    *,
    weight_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    vocab_start: int = 0,
    logits_soft_cap: float = 0.0,
    suppress_ids: Tensor | None = None,
) -> tuple[Spec, ...]:
    rows = tuple(normed.shape[:-1])
    return ((*rows, k), torch.float32), ((*rows, k), torch.int64), (rows, torch.float32)


def contents(
    normed: Tensor,
    weight: Tensor,
    k: int,
    *,
    weight_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    vocab_start: int = 0,
    logits_soft_cap: float = 0.0,
    suppress_ids: Tensor | None = None,
) -> None:
    if token_map is not None:
        check_contents(NAME, "token_map", token_map, token_map < 0, "a token id of at least 0")
    check_suppress_contents(NAME, suppress_ids)
    check_contents_finite(NAME, normed=normed, weight=weight, weight_scale=weight_scale)


def serves(
    normed: Tensor, weight: Tensor, k: int, *, suppress_ids: Tensor | None = None, **options: object
) -> str:
    """Why the Triton kernel does not serve these arguments, or ""."""
    if normed.dim() > 4:
        return f"normed has {normed.dim() - 1} leading dimensions, more than 3"
    if k > 128:
        return f"k is {k}, more than 128: it reads the weight once for every 8"
    if weight.size(0) > 2**22:
        return f"weight has {weight.size(0)} rows, more than 2^22"
    return "normed has no columns" if normed.size(-1) == 0 else too_many_suppressed(suppress_ids)


def serves_cpu(normed: Tensor, weight: Tensor, k: int, **options: object) -> str:
    """Why the C++ kernel does not serve these arguments, or ""."""
    return f"k is {k}, more than 128: every 1024 rows of the weight keep their best" if k > 128 else ""


register(SCHEMA, check=check, outputs=outputs, reference=reference, contents=contents,
         kernels=(triton_kernel(NAME, serves), cpp_kernel(NAME, serves_cpu)))
