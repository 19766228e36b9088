"""Around the heads: a head's rows in centroid order, a head in fp8, and the merge of a head's shards."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops._checks import (
    FLOATS,
    check_device,
    check_dtype,
    check_index,
    check_min_rank,
    check_rank,
    check_shape,
    require,
)
from .ops._contents import check_contents_finite, check_contents_range
from .reference._rank import log_sum_exp, rank_by_id, to_logprobs

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
ROWS_AT_A_TIME = 8192


def reorder_lm_head(lm_head_weight: Tensor, token_ordering: Tensor) -> Tensor:
    """The head's rows in centroid order, lm_head_weight[token_ordering]: what `centroid_ordered=True` expects.

    Done once, when a model is loaded: a centroid's rows then lie in one block.

    Args:
        lm_head_weight: [vocab, hidden], any dtype.
        token_ordering: [vocab] int32 or int64, the token ids sorted by centroid.

    Returns:
        [vocab, hidden], a new tensor.

    Raises:
        ArgumentError: a wrong rank, size, dtype or device; an entry of token_ordering outside the vocabulary (its
            contents are read on the host).

    >>> reorder_lm_head(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([2, 0, 1])).flatten()
    tensor([2., 0., 1.])
    """
    op = "reorder_lm_head"
    check_rank(op, "lm_head_weight", lm_head_weight, 2)
    vocab = lm_head_weight.size(0)
    check_shape(op, "token_ordering", token_ordering, (vocab,), f"lm_head_weight has {vocab} rows")
    check_index(op, "token_ordering", token_ordering)
    check_device(op, lm_head_weight.device, "lm_head_weight", token_ordering=token_ordering)
    if not token_ordering.is_meta:
        check_contents_range(op, "token_ordering", token_ordering, 0, vocab - 1, f"lm_head_weight has {vocab} rows")
    return lm_head_weight[token_ordering.long()]


def quantize_lm_head(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The head in fp8 with one scale a row, as `lm_head_topk` takes it: weight ~ quantized * scale.

    scale = max|row| / 448, so that a row's largest value becomes fp8's largest; a row of zeros has scale 1.

    Args:
        weight: [rows, hidden], bf16, fp16 or fp32, all finite.

    Returns:
        quantized [rows, hidden] float8_e4m3fn, weight_scale [rows] fp32.

    Raises:
        ArgumentError: a wrong rank or dtype; a value that is not finite (contents are read on the host).

    >>> quantized, scale = quantize_lm_head(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> scale
    tensor([0.0045, 1.0000])
    >>> quantized.float() * scale.unsqueeze(-1)
    tensor([[ 1., -2.],
            [ 0.,  0.]])
    """
    op = "quantize_lm_head"
    check_rank(op, "weight", weight, 2)
    check_dtype(op, "weight", weight, FLOATS)
    require(weight.size(1) > 0, op, "weight", "at least 1 column", weight.size(1))
    check_contents_finite(op, weight=weight)
    largest = weight.abs().amax(dim=1).float()  # [rows]
    scale = torch.where(largest > 0, (largest / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for start in range(0, weight.size(0), ROWS_AT_A_TIME):  # a whole head in fp32 may not fit beside itself
        rows = slice(start, start + ROWS_AT_A_TIME)
        scaled = weight[rows].float() / scale[rows].unsqueeze(-1)
        quantized[rows] = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return quantized, scale


def merge_topk(logprobs: Tensor, token_ids: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The k best over all shards of a head, from what `lm_head_topk` gave on each: one all-gather a step is enough.

    global logprob = logprob + logsumexp - logsumexp over ranks. The first sum is the token's logit again, up to fp32
    rounding (exactly, where the logprob is small beside it), and tokens are ranked by it: the lowest id wins a tie.

    Args:
        logprobs: [ranks, ..., k] fp32, of each shard by itself.
        token_ids: [ranks, ..., k] int32 or int64, ids of the whole vocabulary.
        logsumexp: [ranks, ...] fp32, of each shard.

    Returns:
        logprobs [..., k] fp32 (at most 0), token_ids [..., k] int64, logsumexp [...] fp32, as of the whole head. Every
        rank that merges the same gathered tensors gets the same bits.

    Raises:
        ArgumentError: a wrong rank, size, dtype or device.

    >>> logprobs = torch.tensor([[[0.0]], [[0.0]]])  # two ranks, one row, k = 1: each shard has one token
    >>> merge_topk(logprobs, torch.tensor([[[4]], [[9]]]), torch.tensor([[1.0], [2.0]]))
    (tensor([[-0.3133]]), tensor([[9]]), tensor([2.3133]))
    """
    op = "merge_topk"
    check_min_rank(op, "logprobs", logprobs, 2)
    check_dtype(op, "logprobs", logprobs, (torch.float32,))
    require(logprobs.size(0) > 0, op, "logprobs", "at least 1 rank", logprobs.size(0))
    check_shape(op, "token_ids", token_ids, tuple(logprobs.shape), "the shape of logprobs")
    check_index(op, "token_ids", token_ids)
    check_shape(op, "logsumexp", logsumexp, tuple(logprobs.shape[:-1]), "logprobs without its last dimension")
    check_dtype(op, "logsumexp", logsumexp, (torch.float32,))
    check_device(op, logprobs.device, "logprobs", token_ids=token_ids, logsumexp=logsumexp)
    k = logprobs.size(-1)
    total = log_sum_exp(logsumexp.movedim(0, -1))  # [...]
    logits = (logprobs + logsumexp.unsqueeze(-1)).movedim(0, -2).flatten(-2)  # [..., ranks * k]
    best, best_ids = rank_by_id(logits, token_ids.movedim(0, -2).flatten(-2).long(), k)
    return to_logprobs(best, total), best_ids, total
