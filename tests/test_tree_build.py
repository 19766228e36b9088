"""tree_build against plain Python: nodes, positions, mask and links, exactly, for good and malformed candidates."""

from __future__ import annotations

import math
from typing import Any

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
)
from head_cases import check_reads_nothing
from torch import Tensor
from tree_cases import INDICES, INT_MIN, build, on, places

from mtp_kernels.reference.tree_build import tree_build as reference

OP = "tree_build"
NAN, INF = math.nan, math.inf


def grown(steps: int, topk: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and parents of one request's candidates; scores fall along every path, in steps of 0.25 (ties)."""
    generator = torch.Generator().manual_seed(seed)
    scores: list[float] = []
    parents: list[int] = []
    frontier = [(-1, 0.0)]
    for _ in range(steps):
        candidates = []
        for parent, score in frontier:
            for _ in range(topk):
                candidates.append((len(scores), score - int(torch.randint(0, 9, (), generator=generator)) / 4))
                scores.append(candidates[-1][1])
                parents.append(parent)
        frontier = sorted(candidates, key=lambda c: (-c[1], c[0]))[:topk]
    ids = torch.randint(0, 1000, (len(scores),), generator=generator)
    return torch.tensor(scores), ids, torch.tensor(parents)


def arguments(batch: int = 2, num_nodes: int = 6, steps: int = 3, topk: int = 2, device: str = "cpu",
              dtypes: tuple[torch.dtype, ...] = (torch.int64,) * 4) -> tuple[Any, ...]:
    """`dtypes` are those of root_ids, cand_ids, cand_parent and root_positions."""
    made = [grown(steps, topk, seed) for seed in range(max(batch, 1))]
    scores, ids, parents = (torch.stack(tensors)[:batch] for tensors in zip(*made))
    roots, positions = torch.arange(batch) + 900, torch.arange(batch) * 7 + 40
    root, cand, parent, position = dtypes
    return on(device, roots.to(root), scores, ids.to(cand), parents.to(parent), positions.to(position), num_nodes)


def expected(roots: Tensor, scores: Tensor, ids: Tensor, parents: Tensor, positions: Tensor, num_nodes: int
             ) -> list[list[Any]]:
    """The eight results as lists, request by request."""
    made = [build(int(roots[b]), scores[b].tolist(), ids[b].tolist(), parents[b].tolist(), int(positions[b]),
                  num_nodes, b) for b in range(roots.size(0))]
    return [[request[i] for request in made] for i in range(8)]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize(
    ("batch", "num_nodes", "steps", "topk"),
    [(1, 1, 1, 1), (2, 2, 1, 1), (3, 5, 4, 1), (2, 16, 4, 4), (1, 53, 4, 4), (5, 7, 3, 2), (0, 4, 2, 2), (2, 1, 2, 3),
     (1, 129, 3, 8), (1, 33, 32, 1), (2, 60, 6, 8)],
)
def test_against_plain_python(device: str, implementation: str, batch: int, num_nodes: int, steps: int, topk: int
                              ) -> None:
    args = arguments(batch, num_nodes, steps, topk, device)
    with forced(implementation):
        got = call(OP, *args)
    assert [r.tolist() for r in got] == expected(*args)
    assert [r.dtype for r in got] == [torch.int64] * 4 + [torch.bool] + [torch.int64] * 3


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("which", range(4))
def test_index_dtypes(device: str, implementation: str, which: int) -> None:
    dtypes = [torch.int64] * 4
    dtypes[which] = torch.int32
    with forced(implementation):
        one = call(OP, *arguments(device=device, dtypes=tuple(dtypes)))
        two = call(OP, *arguments(device=device))
    for a, b in zip(one, two):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_no_candidates_at_all(device: str, implementation: str) -> None:
    roots, positions = on(device, [3, 4], [10, 20])
    nothing = torch.empty(2, 0, device=device)
    with forced(implementation):
        got = call(OP, roots, nothing, nothing.long(), nothing.int(), positions, 1)
    assert [r.tolist() for r in got] == [[[3], [4]], [[10], [20]], [[-1], [-1]], [[], []], [[[True]]] * 2, [[0], [1]],
                                         [[-1], [-1]], [[-1], [-1]]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_ranking(device: str, implementation: str) -> None:
    """NaN counts as -inf, -0.0 equals 0.0, the lowest index wins a tie, and nodes stand in index order."""
    scores = torch.tensor([[NAN, -1.0, -INF, -0.0, 0.0, NAN], [-1.0, -0.5, -1.0, -0.5, -1.0, -0.5],
                           [NAN, -INF, NAN, -INF, NAN, -INF]])
    roots, scores, ids, parents, positions = on(device, [0] * 3, scores, [[*range(6)]] * 3, [[-1] * 6] * 3, [0] * 3)
    for kept, chosen in (
        (1, [[3], [1], [0]]),
        (2, [[3, 4], [1, 3], [0, 1]]),
        (4, [[0, 1, 3, 4], [0, 1, 3, 5], [0, 1, 2, 3]]),
        (5, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 4]]),
    ):
        with forced(implementation):
            got = call(OP, roots, scores, ids, parents, positions, kept + 1)
        assert got[3].tolist() == chosen
        assert got[0][:, 1:].tolist() == chosen


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("dtype", INDICES)
def test_malformed_parents(device: str, implementation: str, dtype: torch.dtype) -> None:
    """Below -1, itself, later, not kept, past the end: an orphan stays in place, and its own children hang under it."""
    low, high = (INT_MIN, 2**31 - 1) if dtype == torch.int32 else (-(2**40), 2**40)
    parent = [-1, 1, 0, 7, low, high, 4, 3, 6, -2]
    scores = torch.tensor([[0.0, -1, -9, -1, -1, -1, -1, -1, -1, -1]])  # candidate 2 is not kept
    roots, scores, ids, parents, positions = on(device, [50], scores, [[*range(10)]], [parent], [100])
    with forced(implementation):
        got = call(OP, roots, scores, ids, parents.to(dtype), positions, 10)
    _, draft_positions, node_parents, selected, mask, _, next_token, next_sibling = got
    assert selected.tolist() == [[0, 1, 3, 4, 5, 6, 7, 8, 9]]
    assert node_parents.tolist() == [[-1, 0, -1, -1, -1, -1, 4, 3, 6, -1]]
    assert draft_positions.tolist() == [[100, 101, 100, 100, 100, 100, 101, 101, 102, 100]]
    assert next_token.tolist() == [[1, -1, -1, 7, 6, -1, 8, -1, -1, -1]]
    assert next_sibling.tolist() == [[-1] * 10]
    assert [[j for j in range(10) if mask[0, i, j]] for i in range(10)] == [
        [0], [0, 1], [2], [3], [4], [5], [4, 6], [3, 7], [4, 6, 8], [9]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_a_parent_that_is_not_kept(device: str, implementation: str) -> None:
    """Only scores that rise along a path lose a parent."""
    roots, scores, ids, parents, positions = on(
        device, [9], torch.tensor([[-5.0, -1.0, -2.0]]), [[1, 2, 3]], [[-1, 0, 1]], [0])
    with forced(implementation):
        got = call(OP, roots, scores, ids, parents, positions, 3)
    assert got[2].tolist() == [[-1, -1, 1]] and got[1].tolist() == [[0, 0, 1]]
    assert got[6].tolist() == [[-1, 2, -1]] and got[7].tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_large_positions_and_ids(device: str, implementation: str) -> None:
    args = list(arguments(1, 4, 3, 1, device))
    args[0], args[2], args[4] = args[0] + 2**40, args[2] - 2**41, args[4] + 2**33
    with forced(implementation):
        got = call(OP, *args)
    assert [r.tolist() for r in got] == expected(*args)


def test_reference_ranks_in_fp64() -> None:
    roots, _, ids, parents, positions, _ = arguments(1, 2, 1, 2)
    scores = torch.tensor([[-1.0 - 1e-12, -1.0]], dtype=torch.float64)
    assert reference(roots, scores, ids, parents, positions, 2)[3].tolist() == [[1]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_contract(device: str, implementation: str) -> None:
    with forced(implementation):
        check_everything(OP, *arguments(device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    check_compiled(OP, *arguments(device=device))


def test_reads_nothing() -> None:
    check_reads_nothing(OP, *arguments())


def test_errors() -> None:
    roots, scores, ids, parents, positions, num_nodes = arguments()  # 10 candidates
    for message, *args in (
        ("root_ids: expected 1 dimensions, got 2 ([2, 1])", roots[:, None], scores, ids, parents, positions, num_nodes),
        ("root_ids: expected int32 or int64, got float32", roots.float(), scores, ids, parents, positions, num_nodes),
        ("cand_scores: expected [2, *], got [1, 10] (batch of root_ids is 2)", roots, scores[:1], ids, parents,
         positions, num_nodes),
        ("cand_scores: expected float32, got float64", roots, scores.double(), ids, parents, positions, num_nodes),
        ("cand_ids: expected [2, 10], got [2, 9] (cand_scores is [2, 10])", roots, scores, ids[:, 1:], parents,
         positions, num_nodes),
        ("cand_ids: expected int32 or int64, got uint8", roots, scores, ids.byte(), parents, positions, num_nodes),
        ("cand_parent: expected [2, 10], got [10] (cand_scores is [2, 10])", roots, scores, ids, parents[0],
         positions, num_nodes),
        ("cand_parent: expected int32 or int64, got float32", roots, scores, ids, parents.float(), positions,
         num_nodes),
        ("root_positions: expected [2], got [1] (batch of root_ids is 2)", roots, scores, ids, parents, positions[:1],
         num_nodes),
        ("root_positions: expected int32 or int64, got float32", roots, scores, ids, parents, positions.float(),
         num_nodes),
        ("num_draft_tokens: expected 1 to 11, got 12 (the root and 10 candidates)", roots, scores, ids, parents,
         positions, 12),
        ("num_draft_tokens: expected 1 to 11, got 0 (the root and 10 candidates)", roots, scores, ids, parents,
         positions, 0),
        ("cand_ids: expected a contiguous last dimension, got strides [1, 2]", roots, scores,
         ids.t().contiguous().t(), parents, positions, num_nodes),
    ):
        check_error(OP, f"tree_build: {message}", *args)


def test_device_errors() -> None:
    check_device_errors(OP, *arguments())


def test_debug_names_the_first_offender() -> None:
    def changed(place: int, *index: int, to: float) -> tuple[Any, ...]:
        args = arguments()
        args[place][index] = to
        return args

    for message, args in (
        ("root_ids[1]: expected a token id of at least 0, got -1", changed(0, 1, to=-1)),
        ("cand_ids[0, 4]: expected a token id of at least 0, got -5", changed(2, 0, 4, to=-5)),
        ("cand_scores[0, 2]: expected at most 0, got nan", changed(1, 0, 2, to=NAN)),
        ("cand_parent[1, 3]: expected -1 or an earlier candidate, got 3", changed(3, 1, 3, to=3)),
        ("root_positions[0]: expected at least 0, got -2", changed(4, 0, to=-2)),
    ):
        check_debug_error(OP, f"tree_build: {message}", *args)
