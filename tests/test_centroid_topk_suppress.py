"""centroid_topk and centroid_logits with suppress_ids: tokens that are never chosen, against plain sorting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import (
    DEVICES,
    FLOATS,
    assert_same_bits,
    call,
    check_compiled,
    check_debug_error,
    check_device_errors,
    check_error,
    check_everything,
    forced,
    implementations,
)
from head_cases import INDICES, assert_topk, check_reads_nothing, check_rows_alone, exact_on_cpu, integers

from mtp_kernels import reorder_lm_head

OP = "centroid_topk"
LOGITS = "centroid_logits"
CENTROIDS, SIZE, ACTIVE = 10, 6, 5


def arguments(rows: int = 9, dtype: torch.dtype = torch.float32, device: str = "cpu", make: Any = integers
              ) -> tuple[Any, ...]:
    vocab = CENTROIDS * SIZE
    normed, centroids, head = (make(n, 8, seed=n, dtype=dtype, device=device) for n in (rows, CENTROIDS, vocab))
    ordering = torch.randperm(vocab, generator=torch.Generator().manual_seed(3)).to(device)
    return normed, centroids, ordering, head, ACTIVE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("k", [1, 4])
def test_never_chosen(device: str, implementation: str, dtype: torch.dtype, index: torch.dtype, ordered: bool, k: int
                      ) -> None:
    """Exact logits that tie often; the best token of every row is suppressed, and its centroids stay as they are."""
    normed, centroids, ordering, head, active = arguments(dtype=dtype, device=device)
    args = (normed, centroids, ordering, reorder_lm_head(head, ordering) if ordered else head, active)
    with forced(implementation):
        plain, candidates = call(LOGITS, *args, centroid_ordered=ordered)
        best = call(OP, *args, 1, centroid_ordered=ordered)[1].flatten().unique()
        suppress = torch.cat([best, best[:1], torch.tensor([-1], device=device)]).to(index)
        got = call(OP, *args, k, centroid_ordered=ordered, suppress_ids=suppress)
        logits, ids = call(LOGITS, *args, centroid_ordered=ordered, suppress_ids=suppress)
    assert_same_bits(ids, candidates)
    assert_same_bits(logits, plain.masked_fill(torch.isin(ids, suppress.long()), -math.inf))
    assert not set(got[1].flatten().tolist()) & set(suppress.tolist())
    assert_topk(got, list(zip(logits.double().tolist(), ids.tolist())), k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_nothing_else_left(device: str, implementation: str) -> None:
    """All candidates suppressed: the lowest of them, with -inf; NaN and +inf do not shine through."""
    args = arguments(device=device)
    args[3][4], args[3][5] = torch.nan, torch.inf
    every = torch.arange(CENTROIDS * SIZE, device=device)
    with forced(implementation):
        logprobs, ids, total = call(OP, *args, 3, suppress_ids=every)
        logits, candidates = call(LOGITS, *args, suppress_ids=every)
    assert ids.tolist() == candidates.sort().values[:, :3].tolist()
    assert (logprobs == -math.inf).all() and (total == -math.inf).all() and (logits == -math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_none_and_empty_change_no_bits(device: str, implementation: str) -> None:
    args = arguments(device=device)
    with forced(implementation):
        plain = call(OP, *args, 5)
        for ids in ([], [-1, CENTROIDS * SIZE, 2**40]):
            suppress = torch.tensor(ids, device=device).long()
            for one, two in zip(call(OP, *args, 5, suppress_ids=suppress), plain):
                assert_same_bits(one, two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_rows_alone(device: str, implementation: str) -> None:
    normed, *rest = arguments(37, device=device, make=exact_on_cpu(device))
    check_rows_alone(OP, implementation, normed, *rest, 4, suppress_ids=torch.tensor([3, 50, 59], device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", INDICES)
def test_contract(device: str, index: torch.dtype) -> None:
    args, suppress = arguments(device=device), torch.tensor([3, 17, -1, 8], dtype=index, device=device)
    for op, more in ((OP, (4,)), (LOGITS, ())):
        check_everything(op, *args, *more, suppress_ids=suppress)
        check_reads_nothing(op, *args, *more, suppress_ids=suppress)


def test_compiled_and_devices() -> None:
    for op, more in ((OP, (4,)), (LOGITS, ())):
        check_compiled(op, *arguments(), *more, suppress_ids=torch.tensor([3, 17]))
        check_device_errors(op, *arguments(), *more, suppress_ids=torch.tensor([3, 17]))


@pytest.mark.parametrize("op", [OP, LOGITS])
def test_errors(op: str) -> None:
    args = (*arguments(), 4)[: 6 if op == OP else 5]
    for message, suppress in (
        ("expected 1 dimensions, got 2 ([1, 3])", torch.zeros(1, 3).long()),
        ("expected int32 or int64, got float32", torch.zeros(3)),
        ("expected a contiguous last dimension, got strides [2]", torch.zeros(6).long()[::2]),
    ):
        check_error(op, f"{op}: suppress_ids: {message}", *args, suppress_ids=suppress)
    check_debug_error(op, f"{op}: suppress_ids[1]: expected -1 to 59, got 60 (-1 is none)", *args,
                      suppress_ids=torch.tensor([-1, 60]))
