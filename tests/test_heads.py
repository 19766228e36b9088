"""reorder_lm_head, quantize_lm_head and merge_topk: what they promise, and their errors."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import DEVICES, FLOATS, assert_same_bits, random_tensor
from head_cases import sort_row
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels import ArgumentError, merge_topk, quantize_lm_head, reorder_lm_head

Shard = list[tuple[float, int]]  # (logit, id)


def error(message: str, function: Any, *args: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        function(*args)
    assert str(caught.value) == message


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_reorder(device: str, index: torch.dtype) -> None:
    ordering = torch.randperm(12, generator=torch.Generator().manual_seed(1)).to(index).to(device)
    for dtype in (*FLOATS, torch.float8_e4m3fn):
        head = random_tensor(12, 5, seed=2, device=device).to(dtype)
        before = head.clone()
        ordered = reorder_lm_head(head, ordering)
        for place, token in enumerate(ordering.tolist()):
            assert_same_bits(ordered[place], before[token])
        ordered.zero_()
        assert_same_bits(head, before)


def test_reorder_errors() -> None:
    head, ordering = torch.zeros(4, 3), torch.arange(4)
    error("reorder_lm_head: lm_head_weight: expected 2 dimensions, got 1 ([3])", reorder_lm_head, head[0], ordering)
    error("reorder_lm_head: token_ordering: expected [4], got [3] (lm_head_weight has 4 rows)", reorder_lm_head, head,
          ordering[:3])
    error("reorder_lm_head: token_ordering: expected int32 or int64, got float32", reorder_lm_head, head,
          ordering.float())
    error("reorder_lm_head: token_ordering: expected cpu, got meta (lm_head_weight is on cpu)", reorder_lm_head, head,
          ordering.to("meta"))
    error("reorder_lm_head: token_ordering[2]: expected 0 to 3, got 4 (lm_head_weight has 4 rows)", reorder_lm_head,
          head, torch.tensor([0, 1, 4, -1]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value within half a step of e4m3: relative 2^-4, or 2^-10 of the scale below its normal range."""
    monkeypatch.setattr("mtp_kernels.heads.ROWS_AT_A_TIME", 7)
    weight = random_tensor(20, 64, seed=1, device=device) * torch.logspace(-4, 3, 20, device=device).unsqueeze(1)
    weight = weight.to(dtype)
    weight[4] = 0
    weight[5, 1:] = 0
    quantized, scale = quantize_lm_head(weight)
    assert quantized.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (20,)
    assert scale[4] == 1 and (scale > 0).all()
    back = quantized.double() * scale.double().unsqueeze(1)
    error_ = (back - weight.double()).abs()
    assert (error_ <= torch.maximum(weight.double().abs() * 2**-4, scale.double().unsqueeze(1) * 2**-10) * 1.0001).all()
    largest = torch.arange(20, device=device) != 4
    assert (quantized.double().abs().amax(1)[largest] == 448).all()


@pytest.mark.parametrize("value", [1e-45, 1e-38, 3e38])
def test_quantize_extremes(value: float) -> None:
    quantized, scale = quantize_lm_head(torch.tensor([[value, -value / 2]]))
    assert torch.isfinite(scale).all() and torch.isfinite(quantized.float()).all() and (scale > 0).all()


def test_quantize_errors() -> None:
    weight = torch.zeros(3, 4)
    error("quantize_lm_head: weight: expected 2 dimensions, got 1 ([4])", quantize_lm_head, weight[0])
    error("quantize_lm_head: weight: expected bfloat16 or float16 or float32, got float64", quantize_lm_head,
          weight.double())
    error("quantize_lm_head: weight: expected at least 1 column, got 0", quantize_lm_head, weight[:, :0])
    weight[2, 1] = torch.nan
    error("quantize_lm_head: weight[2, 1]: expected a finite value, got nan", quantize_lm_head, weight)


def head_of(shard: Shard, k: int) -> tuple[list[float], list[int], float]:
    return sort_row([logit for logit, _ in shard], [i for _, i in shard], k)


def merge_row(shards: list[Shard], k: int, device: str = "cpu") -> tuple[list[float], list[int], float]:
    parts = [head_of(shard, k) for shard in shards]
    logprobs, ids, total = merge_topk(
        torch.tensor([[p[0]] for p in parts], device=device),
        torch.tensor([[p[1]] for p in parts], device=device),
        torch.tensor([[p[2]] for p in parts], device=device),
    )
    return logprobs[0].tolist(), ids[0].tolist(), total.item()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_merge_equals_the_whole(data: st.DataObject) -> None:
    """Shards of ids dealt out at random, logits that often tie across shards: the ids of the whole, in its order."""
    k = data.draw(st.integers(1, 4))
    ranks = data.draw(st.integers(1, 4))
    # Logits large beside their logprobs come back exactly from logprob + logsumexp, so that ties are exact too.
    logits = data.draw(st.lists(st.integers(40, 48), min_size=ranks * k, max_size=ranks * k + 12))
    order = data.draw(st.permutations(range(len(logits))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(logits) - ranks * k), min_size=ranks - 1, max_size=ranks - 1)))
    edges = [0, *(cut + k * (i + 1) for i, cut in enumerate(cuts)), len(logits)]
    whole = [(float(logits[i]), i) for i in order]
    shards = [whole[a:b] for a, b in pairwise(edges)]
    expected = head_of(whole, k)
    logprobs, ids, total = merge_row(shards, k)
    assert ids == expected[1]
    assert max(map(abs, (a - b for a, b in zip(logprobs, expected[0])))) < 1e-5
    assert abs(total - expected[2]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_merge_of_bad_shards(device: str) -> None:
    """A shard of nothing adds nothing; all of nothing is nothing; a certain token wins wherever it is; no NaN."""
    inf, nan = math.inf, math.nan
    good, nothing = [(1.0, 3), (2.0, 1), (0.5, 2)], [(nan, 0), (-inf, 9), (nan, 4)]
    assert merge_row([good, nothing], 2, device)[1] == [1, 3]
    assert merge_row([nothing, good], 3, device)[1] == [1, 3, 2]
    for got, want in zip(merge_row([nothing, good], 3, device)[0], head_of(good, 3)[0]):
        assert abs(got - want) < 1e-6
    assert merge_row([nothing, nothing], 2, device) == ([-inf, -inf], [0, 0], -inf)
    assert merge_row([[(nan, 7), (nan, 5)], [(nan, 6), (nan, 8)]], 2, device) == ([-inf, -inf], [5, 6], -inf)
    logprobs = torch.tensor([[[0.0, -inf]], [[-0.3, -1.4]]], device=device)
    ids, total = torch.tensor([[[8, 0]], [[3, 4]]], device=device), torch.tensor([[inf], [2.0]], device=device)
    merged = merge_topk(logprobs, ids, total)
    assert merged[0].tolist() == [[0.0, -inf]] and merged[1].tolist() == [[8, 3]] and merged[2].tolist() == [inf]


def test_merged_logprobs_are_at_most_zero() -> None:
    """From logprobs that rounding took above 0, as another library's may be."""
    logprobs = torch.tensor([[[2e-6, -20.0]], [[1e-6, -20.0]]])
    merged = merge_topk(logprobs, torch.arange(4).view(2, 1, 2), torch.tensor([[5.0], [-90.0]]))
    assert merged[0][0, 0] == 0 and merged[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("leading", [(), (0,), (2,), (2, 3)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_merge_shapes(leading: tuple[int, ...], index: torch.dtype) -> None:
    logprobs = random_tensor(3, *leading, 4, seed=1).log_softmax(-1)
    ids = torch.arange(logprobs.numel()).view(logprobs.shape).to(index)
    total = random_tensor(3, *leading, seed=2)
    merged = merge_topk(logprobs, ids, total)
    assert [(m.shape, m.dtype) for m in merged] == [
        ((*leading, 4), torch.float32), ((*leading, 4), torch.int64), (leading, torch.float32)
    ]
    torch.testing.assert_close(merged[2], total.logsumexp(0))
    one = merge_topk(logprobs[:1], ids[:1], total[:1])
    assert_same_bits(one[2], total[0])
    meta = merge_topk(logprobs.to("meta"), ids.to("meta"), total.to("meta"))  # no host copy
    assert [m.shape for m in meta] == [m.shape for m in merged]


def test_merge_errors() -> None:
    logprobs, ids, total = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).long(), torch.zeros(2, 3)
    error("merge_topk: logprobs: expected at least 2 dimensions, got 1 ([4])", merge_topk, logprobs[0, 0], ids, total)
    error("merge_topk: logprobs: expected float32, got float16", merge_topk, logprobs.half(), ids, total)
    error("merge_topk: logprobs: expected at least 1 rank, got 0", merge_topk, logprobs[:0], ids[:0], total[:0])
    error("merge_topk: token_ids: expected [2, 3, 4], got [1, 3, 4] (the shape of logprobs)", merge_topk, logprobs,
          ids[:1], total)
    error("merge_topk: token_ids: expected int32 or int64, got float32", merge_topk, logprobs, ids.float(), total)
    error("merge_topk: logsumexp: expected [2, 3], got [2] (logprobs without its last dimension)", merge_topk, logprobs,
          ids, total[:, 0])
    error("merge_topk: logsumexp: expected float32, got float64", merge_topk, logprobs, ids, total.double())
    error("merge_topk: logsumexp: expected cpu, got meta (logprobs is on cpu)", merge_topk, logprobs, ids,
          total.to("meta"))
