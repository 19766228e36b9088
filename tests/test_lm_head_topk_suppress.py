"""lm_head_topk with suppress_ids: tokens that are never chosen, against plain sorting."""

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
    served_by,
)
from head_cases import INDICES, assert_topk, check_reads_nothing, check_rows_alone, exact_on_cpu, integers

from mtp_kernels import merge_topk, quantize_lm_head

OP = "lm_head_topk"
ROWS = 37


def names_of(ids: str, device: str) -> tuple[list[int], dict[str, Any]]:
    if ids == "mapped":
        named = torch.randperm(400, generator=torch.Generator().manual_seed(5))[:ROWS]
        return named.tolist(), {"token_map": named.to(device)}
    start = 1000 if ids == "from 1000" else 0
    return list(range(start, start + ROWS)), {"vocab_start": start}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize("ids", ["from 0", "from 1000", "mapped"])
def test_never_chosen(device: str, implementation: str, dtype: torch.dtype, index: torch.dtype, k: int, ids: str
                      ) -> None:
    """Exact logits that tie often; the best tokens of every row are suppressed, one of them twice."""
    normed, weight = (integers(n, 8, seed=n, dtype=dtype, device=device) for n in (11, ROWS))
    named, options = names_of(ids, device)
    with forced(implementation):
        best = call(OP, normed, weight, 2, **options)[1].flatten().unique()
        strangers = torch.tensor([-1, 999, 500, 2**31 - 1], device=device)
        suppress = torch.cat([best, best[:1], strangers]).to(index)
        got = call(OP, normed, weight, k, suppress_ids=suppress, **options)
    never = set(suppress.tolist())
    exact = (normed.double() @ weight.double().T).tolist()
    rows = [[-math.inf if token in never else x for x, token in zip(row, named)] for row in exact]
    assert k + len(best) < ROWS and not never & set(got[1].flatten().tolist())
    assert_topk(got, [(row, named) for row in rows], k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("capped", [False, True])
def test_nothing_else_left(device: str, implementation: str, capped: bool) -> None:
    """Every token suppressed but one, or all: the lowest ids fill up, with -inf; NaN and +inf do not shine through."""
    normed, weight = (integers(n, 8, seed=n, device=device) for n in (3, ROWS))
    weight[4], weight[5] = torch.nan, torch.inf
    options = {"logits_soft_cap": 3.0} if capped else {}
    every = torch.arange(ROWS, device=device)
    with forced(implementation):
        one = call(OP, normed, weight, 4, suppress_ids=every[every != 9], **options)
        none = call(OP, normed, weight, 4, suppress_ids=every, **options)
    assert one[1].tolist() == [[9, 0, 1, 2]] * 3
    assert one[0].tolist() == [[0.0] + [-math.inf] * 3] * 3 and one[2].isfinite().all()
    assert none[1].tolist() == [[0, 1, 2, 3]] * 3
    assert (none[0] == -math.inf).all() and (none[2] == -math.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_none_and_empty_change_no_bits(device: str, implementation: str) -> None:
    normed, weight = (integers(n, 8, seed=n, device=device) for n in (5, ROWS))
    with forced(implementation):
        plain = call(OP, normed, weight, 5)
        for ids in ([], [-1, ROWS, 2**40]):
            suppress = torch.tensor(ids, device=device).long()
            for one, two in zip(call(OP, normed, weight, 5, suppress_ids=suppress), plain):
                assert_same_bits(one, two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_shards_and_large_heads(device: str, implementation: str) -> None:
    """Shards with one list of global ids merge to the whole; blocks and chunks of the kernels meet in the middle."""
    normed, weight = (integers(n, 8, seed=n, device=device) for n in (3, 2500))
    suppress = torch.tensor([0, 127, 128, 1023, 1024, 1500, 2499], device=device)
    with forced(implementation):
        suppress = torch.cat([suppress, call(OP, normed, weight, 9)[1].flatten()])
        whole = call(OP, normed, weight, 6, suppress_ids=suppress)
        shards = [call(OP, normed, weight[a:b], 6, vocab_start=a, suppress_ids=suppress)
                  for a, b in ((0, 1100), (1100, 2500))]
    exact = (normed.double() @ weight.double().T).index_fill(1, suppress, -math.inf)
    assert_topk(whole, [(row, range(2500)) for row in exact.tolist()], 6)
    assert merge_topk(*(torch.stack(part) for part in zip(*shards)))[1].tolist() == whole[1].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_rows_alone(device: str, implementation: str) -> None:
    make = exact_on_cpu(device)
    suppress = torch.tensor([3, 50, 299], device=device)
    check_rows_alone(OP, implementation, make(37, 64, seed=1, device=device), make(300, 64, seed=2, device=device), 5,
                     suppress_ids=suppress)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", INDICES)
def test_contract(device: str, index: torch.dtype) -> None:
    normed, weight = (integers(n, 24, seed=n, device=device) for n in (3, 40))
    suppress = torch.tensor([3, 17, -1, 8], dtype=index, device=device)
    quantized, scale = quantize_lm_head(weight)
    for args, options in (((normed, weight, 4), {"vocab_start": 7}), ((normed, quantized, 4), {"weight_scale": scale})):
        check_everything(OP, *args, suppress_ids=suppress, **options)
        check_reads_nothing(OP, *args, suppress_ids=suppress, **options)


def test_compiled_and_devices() -> None:
    normed, weight = (integers(n, 24, seed=n) for n in (3, 40))
    check_compiled(OP, normed, weight, 4, suppress_ids=torch.tensor([3, 17]))
    check_device_errors(OP, normed, weight, 4, suppress_ids=torch.tensor([3, 17]))


def test_a_long_list_is_served() -> None:
    """Kernels that compare each candidate with each id leave a very long list to the reference; the ids are right."""
    normed, weight = (integers(n, 8, seed=n) for n in (2, 3000))
    suppress = torch.arange(2990)
    got = call(OP, normed, weight, 4, suppress_ids=suppress)
    assert set(got[1].flatten().tolist()) <= set(range(2990, 3000))
    assert served_by(OP, normed, weight, 4, suppress_ids=suppress) in ("cpu", "reference")


def test_errors() -> None:
    normed, weight = (integers(n, 24, seed=n) for n in (3, 40))

    def error(message: str, suppress: torch.Tensor) -> None:
        check_error(OP, f"lm_head_topk: suppress_ids: {message}", normed, weight, 4, suppress_ids=suppress)

    error("expected 1 dimensions, got 2 ([1, 3])", torch.zeros(1, 3).long())
    error("expected int32 or int64, got float32", torch.zeros(3))
    error("expected a contiguous last dimension, got strides [2]", torch.zeros(6).long()[::2])
    check_debug_error(OP, "lm_head_topk: suppress_ids[1]: expected a token id, or -1 for none, got -2", normed, weight,
                      4, suppress_ids=torch.tensor([-1, -2]))
