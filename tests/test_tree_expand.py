"""tree_expand against plain Python: scores, ranking and indices, exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    DEVICES,
    assert_same_bits,
    call,
    check_compiled,
    check_debug_error,
    check_device_errors,
    check_error,
    check_everything,
    forced,
    random_tensor,
)
from head_cases import check_reads_nothing
from torch import Tensor
from tree_cases import INDICES, INT_MIN, on, places, rank

from mtp_kernels.reference.tree_expand import tree_expand as reference

OP = "tree_expand"
NAN, INF = math.nan, math.inf


def arguments(batch: int = 2, rows: int = 3, k: int = 3, device: str = "cpu", ids: torch.dtype = torch.int64,
              index: torch.dtype = torch.int64) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Logprobs and scores in steps of 0.5, so that sums are exact and tie often."""
    logprobs = (random_tensor(batch, rows, k, seed=1, device=device) * 4).round().abs() * -0.5
    scores = (random_tensor(batch, rows, seed=2, device=device) * 4).round().abs() * -0.5
    tokens = torch.randint(0, 1000, (batch, rows, k), generator=torch.Generator().manual_seed(3)).to(device, ids)
    frontier = torch.arange(batch * rows, device=device).view(batch, rows).flip(1).to(index) % 4
    return (logprobs, tokens, 6), {"scores": scores, "frontier": frontier}


def expected(*args: Any, scores: Tensor | None = None, frontier: Tensor | None = None) -> list[list[Any]]:
    """The six results as lists, request by request."""
    logprobs, tokens, offset = args
    results: list[list[Any]] = [[] for _ in range(6)]
    for b in range(logprobs.size(0)):
        sums, parents, ids = [], [], []
        for row in range(logprobs.size(1)):
            for column in range(logprobs.size(2)):
                score = np.float32(0.0 if scores is None else float(scores[b, row]))
                with np.errstate(invalid="ignore"):
                    total = float(score + np.float32(float(logprobs[b, row, column])))
                sums.append(-INF if math.isnan(total) else total)
                parents.append(-1 if frontier is None else int(frontier[b, row]))
                ids.append(int(tokens[b, row, column]))
        k = logprobs.size(2)
        best = rank(sums, k)
        made = ([ids[i] for i in best], [i // k for i in best], [sums[i] for i in best], [offset + i for i in best],
                sums, parents)
        for result, value in zip(results, made):
            result.append(value)
    return results


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize(("ids", "index"), [(i, j) for i in INDICES for j in INDICES])
@pytest.mark.parametrize(("batch", "rows", "k"), [(1, 1, 1), (2, 3, 3), (5, 1, 4), (1, 7, 2), (2, 8, 8), (0, 2, 2),
                                                (1, 9, 11)])
def test_against_plain_python(device: str, implementation: str, ids: torch.dtype, index: torch.dtype, batch: int,
                              rows: int, k: int) -> None:
    args, kwargs = arguments(batch, rows, k, device, ids, index)
    with forced(implementation):
        got = call(OP, *args, **kwargs)
    assert [r.tolist() for r in got] == expected(*args, **kwargs)
    assert [r.dtype for r in got] == [torch.int64] * 2 + [torch.float32] + [torch.int64] + [torch.float32, torch.int64]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_first_step(device: str, implementation: str, batch: int) -> None:
    args, _ = arguments(batch, 1, 4, device)
    with forced(implementation):
        got = call(OP, *args)
        same = call(OP, *args, scores=args[0].new_zeros(batch, 1), frontier=args[1].new_full((batch, 1), -1))
    assert [r.tolist() for r in got] == expected(*args)
    for one, two in zip(got, same):
        assert_same_bits(one, two)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_scores_without_an_order(device: str, implementation: str) -> None:
    """NaN, from the input or the addition, becomes -inf; -0.0 ties with 0.0; ties go to the lowest index."""
    logprobs = torch.tensor([[[NAN, -0.0, 0.0], [-INF, INF, -1.0]], [[NAN] * 3, [-INF] * 3], [[-1.0] * 3, [0.0] * 3]])
    scores = torch.tensor([[0.0, -INF], [0.0, 0.0], [0.0, -1.0]])
    tokens = torch.arange(18).view(3, 2, 3)
    (logprobs, scores, tokens, frontier) = on(device, logprobs, scores, tokens, [[0, 1]] * 3)
    with forced(implementation):
        next_ids, row_index, next_scores, next_frontier, cand_scores, _ = call(
            OP, logprobs, tokens, 10, scores=scores, frontier=frontier)
    assert cand_scores.tolist() == [[-INF, 0.0, 0.0, -INF, -INF, -INF], [-INF] * 6, [-1.0] * 6]
    assert next_frontier.tolist() == [[11, 12, 10], [10, 11, 12], [10, 11, 12]]
    assert next_ids.tolist() == [[1, 2, 0], [6, 7, 8], [12, 13, 14]]
    assert row_index.tolist() == [[0] * 3] * 3
    assert next_scores.tolist() == [[0.0, 0.0, -INF], [-INF] * 3, [-1.0] * 3]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_a_negative_zero_does_not_lose_a_tie(device: str, implementation: str) -> None:
    logprobs, scores = torch.full((1, 2, 2), -0.0), torch.tensor([[-0.0, 0.0]])
    logprobs, scores, tokens, frontier = on(device, logprobs, scores, [[[4, 3], [2, 1]]], [[0, 1]])
    with forced(implementation):
        got = call(OP, logprobs, tokens, 2, scores=scores, frontier=frontier)
    assert got[0].tolist() == [[4, 3]] and got[3].tolist() == [[2, 3]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("dtype", INDICES)
def test_ids_out_of_range_pass_through(device: str, implementation: str, dtype: torch.dtype) -> None:
    strange = [-1, INT_MIN, 2**31 - 1] if dtype == torch.int32 else [-1, 2**40, -(2**62)]
    logprobs, tokens = torch.tensor([[[-1.0, -2.0, -3.0]]], device=device), torch.tensor([[strange]], device=device)
    frontier = torch.tensor([[strange[1]]], dtype=dtype, device=device)
    with forced(implementation):
        got = call(OP, logprobs, tokens.to(dtype), 0, scores=logprobs.new_zeros(1, 1), frontier=frontier)
    assert got[0].tolist() == [strange] and got[5].tolist() == [[strange[1]] * 3]


def test_reference_in_fp64() -> None:
    args, kwargs = arguments()
    kwargs["scores"] = kwargs["scores"].double() + 1e-12
    got = reference(args[0].double(), *args[1:], **kwargs)
    assert got[2].dtype == got[4].dtype == torch.float64
    assert_same_bits(got[4], (kwargs["scores"].unsqueeze(-1) + args[0].double()).flatten(1))


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("first", [True, False])
def test_contract(device: str, implementation: str, first: bool) -> None:
    args, kwargs = arguments(rows=1 if first else 3, device=device, index=torch.int32)
    with forced(implementation):
        check_everything(OP, *args, **({} if first else kwargs))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    args, kwargs = arguments(device=device)
    check_compiled(OP, *args, **kwargs)
    check_compiled(OP, *arguments(rows=1, device=device)[0])


def test_reads_nothing() -> None:
    args, kwargs = arguments()
    check_reads_nothing(OP, *args, **kwargs)
    check_reads_nothing(OP, *arguments(rows=1)[0])


def test_errors() -> None:
    (logprobs, tokens, offset), kwargs = arguments()
    shape = "(logprobs is [2, 3, 3])"
    for message, args, changed in (
        ("logprobs: expected 3 dimensions, got 2 ([2, 3])", (logprobs[0, :2], tokens, offset), {}),
        ("logprobs: expected float32, got float16", (logprobs.half(), tokens, offset), {}),
        ("logprobs: expected at least 1 row and 1 column, got [2, 0, 3]", (logprobs[:, :0], tokens, offset), {}),
        ("logprobs: expected at least 1 row and 1 column, got [2, 3, 0]", (logprobs[..., :0], tokens, offset), {}),
        (f"token_ids: expected [2, 3, 3], got [2, 3, 2] {shape}", (logprobs, tokens[..., :2], offset), {}),
        ("token_ids: expected int32 or int64, got float32", (logprobs, tokens.float(), offset), {}),
        ("cand_offset: expected at least 0, got -1", (logprobs, tokens, -1), {}),
        (f"scores: expected [2, 3], got [2, 2] {shape}", None, {"scores": kwargs["scores"][:, :2]}),
        ("scores: expected float32, got float64", None, {"scores": kwargs["scores"].double()}),
        (f"frontier: expected [2, 3], got [1, 3] {shape}", None, {"frontier": kwargs["frontier"][:1]}),
        ("frontier: expected int32 or int64, got int16", None, {"frontier": kwargs["frontier"].short()}),
        ("frontier: expected a tensor, got None (scores is given)", None, {"frontier": None}),
        ("scores: expected a tensor, got None (frontier is given)", None, {"scores": None}),
        ("scores: expected a tensor, got None (logprobs has 3 rows, the first step has 1)", None,
         {"scores": None, "frontier": None}),
        ("token_ids: expected a contiguous last dimension, got strides [9, 1, 3]",
         (logprobs, tokens.transpose(1, 2), offset), {}),
    ):
        check_error(OP, f"tree_expand: {message}", *(args or (logprobs, tokens, offset)), **{**kwargs, **changed})


def test_device_errors() -> None:
    args, kwargs = arguments()
    check_device_errors(OP, *args, **kwargs)


def test_debug_names_the_first_offender() -> None:
    def changed(place: int | str, *index: int, to: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments()
        (kwargs[place] if isinstance(place, str) else args[place])[index] = to
        return args, kwargs

    for message, (args, kwargs) in (
        ("logprobs[1, 2, 0]: expected at most 0, got nan", changed(0, 1, 2, 0, to=NAN)),
        ("token_ids[0, 1, 2]: expected a token id of at least 0, got -1", changed(1, 0, 1, 2, to=-1)),
        ("scores[0, 1]: expected at most 0, got 0.5", changed("scores", 0, 1, to=0.5)),
        ("frontier[1, 1]: expected -1 to 5, got 6 (cand_offset is 6)", changed("frontier", 1, 1, to=6)),
    ):
        check_debug_error(OP, f"tree_expand: {message}", *args, **kwargs)
