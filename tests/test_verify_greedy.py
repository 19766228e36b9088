"""verify_greedy against a walk in plain Python, exactly, for good and malformed links and rows."""

from __future__ import annotations

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
    strided,
)
from head_cases import check_reads_nothing
from tree_cases import INDICES, INT_MIN, LINKS, PARENTS, TOKENS, links_of, on, places, walk_all

OP = "verify_greedy"
NODES = len(TOKENS)

# What the target says at each node of the tree of tree_cases.py, and the nodes that it so accepts.
CASES = {
    "nothing": ([9, 7, 8, 1, 2, 4, 6], []),
    "one": ([8, 1, 5, 0, 0, 0, 0], [2]),
    "two": ([7, 1, 0, 3, 0, 0, 0], [1, 3]),
    "all": ([7, 2, 0, 0, 6, 0, 11], [1, 4, 6]),
}


def arguments(batch: int = 2, max_depth: int = 3, device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (),
              targets: list[list[int]] | None = None) -> tuple[Any, ...]:
    """The tree of tree_cases.py for each request; `dtypes` are those of the five tensors."""
    next_token, next_sibling = links_of(PARENTS)
    rows = torch.arange(batch * NODES).view(batch, NODES)
    if targets is None:
        cycle = list(CASES.values())
        targets = [cycle[(b + 2) % len(cycle)][0] for b in range(batch)]
    target = torch.tensor(targets, dtype=torch.int64).view(batch, NODES)
    ids, child, sibling = (torch.tensor([x] * batch).view(batch, NODES) for x in (TOKENS, next_token, next_sibling))
    made = zip((ids, rows, child, sibling, target), dtypes or [torch.int64] * 5)
    return (*on(device, *(tensor.to(dtype) for tensor, dtype in made)), max_depth)


def expected(*args: Any) -> list[list[Any]]:
    *draft, target, max_depth = args
    return walk_all([t.tolist() for t in draft], target.flatten().tolist(), max_depth)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("case", CASES)
def test_by_hand(device: str, implementation: str, case: str) -> None:
    target, nodes = CASES[case]
    args = arguments(1, 4, device, targets=[target])
    with forced(implementation):
        accept_index, num_accepted, accept_ids = call(OP, *args)
    path = [0, *nodes]
    padding = [-1] * (5 - len(path))
    assert num_accepted.tolist() == [len(nodes)]
    assert accept_index.tolist() == [path + padding]
    assert accept_ids.tolist() == [[*(TOKENS[n] for n in nodes), target[path[-1]], *padding]]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("batch", [0, 1, 2, 5])
@pytest.mark.parametrize("max_depth", [0, 1, 2, 3, 9])
def test_against_plain_python(device: str, implementation: str, batch: int, max_depth: int) -> None:
    args = arguments(batch, max_depth, device)
    with forced(implementation):
        got = call(OP, *args)
    assert [r.tolist() for r in got] == expected(*args)
    assert [r.dtype for r in got] == [torch.int64] * 3
    assert got[0].shape == got[2].shape == (batch, max_depth + 1)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("which", range(5))
def test_index_dtypes(device: str, implementation: str, which: int) -> None:
    dtypes = [torch.int64] * 5
    dtypes[which] = torch.int32
    with forced(implementation):
        one, two = call(OP, *arguments(device=device, dtypes=tuple(dtypes))), call(OP, *arguments(device=device))
    for a, b in zip(one, two):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_target_ids_flat_or_by_node(device: str, implementation: str) -> None:
    *draft, target, max_depth = arguments(3, device=device)
    longer = torch.cat([target.flatten(), target.new_full((4,), -9)])
    with forced(implementation):
        results = [call(OP, *draft, t, max_depth) for t in (target, target.flatten(), longer, strided(target))]
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert_same_bits(a, b)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("flat", [True, False])
def test_a_ragged_verify_batch(device: str, implementation: str, flat: bool) -> None:
    """Rows in any order, with others between them: retrieve_index alone says which row a node has."""
    *draft, target, max_depth = arguments(2, device=device)
    places_of_rows = torch.randperm(2 * NODES, generator=torch.Generator().manual_seed(0)).to(device)
    shuffled = torch.empty_like(target.flatten())
    shuffled[places_of_rows] = target.flatten()
    args = (draft[0], places_of_rows.view(2, NODES), *draft[2:], shuffled if flat else shuffled.view(2, NODES),
            max_depth)
    with forced(implementation):
        got, plain = call(OP, *args), call(OP, *draft, target, max_depth)
    assert [r.tolist() for r in got] == expected(*args)
    assert_same_bits(got[1], plain[1])
    assert_same_bits(got[2], plain[2])


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("bad", [-1, 14, INT_MIN, 2**40])
def test_rows_out_of_range(device: str, implementation: str, bad: int) -> None:
    """A node without a row is passed over; a root without one gives the bonus -1."""
    args = arguments(2, 3, device, targets=[CASES["all"][0]] * 2)
    args[1][0, 4] = bad
    args[1][1, 0] = bad
    args[0][1, 1] = -1  # equals the target that is not there
    with forced(implementation):
        got = call(OP, *args)
    assert [r.tolist() for r in got] == [[[0, 1, -1, -1], [bad, -1, -1, -1]], [1, 0], [[7, 2, -1, -1], [-1] * 4]]
    assert [r.tolist() for r in got] == expected(*args)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(d, bad) for d in INDICES for bad in (0, NODES, -2, INT_MIN, 2**31 - 1)] + [(torch.int64, 2**40)],
)
def test_links_out_of_range_end_a_list(device: str, implementation: str, dtype: torch.dtype, bad: int) -> None:
    dtypes = (torch.int64, torch.int64, dtype, dtype, torch.int64)
    target = [TOKENS[0], *CASES["all"][0][1:]]  # so that a link to the root would match
    args = arguments(2, 3, device, dtypes, targets=[target, CASES["one"][0]])
    args[2][0, 0] = bad
    args[3][1, 1] = bad
    with forced(implementation):
        got = call(OP, *args)
    assert got[1].tolist() == [0, 0]
    assert [r.tolist() for r in got] == expected(*args)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_rings_end(device: str, implementation: str) -> None:
    """A ring of siblings without a match, one with the match behind it, and a ring of children that all match."""
    ids, rows = torch.tensor([[0, 1, 2, 3]] * 3), torch.arange(12).view(3, 4)
    next_token = [[1, -1, -1, -1], [3, -1, -1, -1], [1, 2, 1, 3]]
    next_sibling = [[-1, 2, 1, -1], [-1, 3, 1, 2], [-1] * 4]
    target = [[9, 9, 9, 9], [1, 9, 9, 9], [1, 2, 1, 3]]
    args = on(device, ids, rows, next_token, next_sibling, target, 8)
    with forced(implementation):
        got = call(OP, *args)
    assert got[1].tolist() == [0, 1, 3]
    assert got[2][2].tolist() == [1, 2, 1, 2, -1, -1, -1, -1, -1]
    assert [r.tolist() for r in got] == expected(*args)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_siblings_in_link_order(device: str, implementation: str) -> None:
    """Of two children with the same token the first by the links is taken, even if its node is the higher."""
    args = on(device, [[0, 7, 7]], [[0, 1, 2]], [[2, -1, -1]], [[-1, -1, 1]], [7, 11, 12], 2)
    with forced(implementation):
        got = call(OP, *args)
    assert [r.tolist() for r in got] == [[[0, 2, -1]], [1], [[7, 12, -1]]]


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
    ids, rows, next_token, next_sibling, target, depth = arguments()
    links = (rows, next_token, next_sibling)
    for message, *args in (
        ("draft_ids: expected 2 dimensions, got 1 ([7])", ids[0], *links, target, depth),
        ("draft_ids: expected int32 or int64, got float32", ids.float(), *links, target, depth),
        ("draft_ids: expected at least 1 node, got 0 (node 0 is the root)", ids[:, :0], *(x[:, :0] for x in links),
         target[:, :0], depth),
        ("target_ids: expected 1 dimensions or 2 dimensions, got 3 ([2, 7, 1])", ids, *links, target[..., None], depth),
        ("target_ids: expected [2, 7], got [2, 6] (draft_ids is [2, 7])", ids, *links, target[:, 1:], depth),
        ("target_ids: expected at least 14 rows, got 13 (draft_ids is [2, 7])", ids, *links, target.flatten()[1:],
         depth),
        ("target_ids: expected int32 or int64, got float32", ids, *links, target.float(), depth),
        ("max_depth: expected at least 0, got -1", ids, *links, target, -1),
        ("draft_ids: expected a contiguous last dimension, got strides [1, 2]", ids.t().contiguous().t(), *links,
         target, depth),
        ("target_ids: expected a contiguous last dimension, got strides [2]", ids, *links,
         target.flatten().repeat_interleave(2)[::2], depth),
    ):
        check_error(OP, f"verify_greedy: {message}", *args)
    for i, name in enumerate(LINKS):
        short, wrong = list(links), list(links)
        short[i], wrong[i] = links[i][:, 1:], links[i].float()
        check_error(OP, f"verify_greedy: {name}: expected [2, 7], got [2, 6] (draft_ids is [2, 7])", ids, *short,
                    target, depth)
        check_error(OP, f"verify_greedy: {name}: expected int32 or int64, got float32", ids, *wrong, target, depth)


def test_device_errors() -> None:
    check_device_errors(OP, *arguments())


def test_debug_names_the_first_offender() -> None:
    def changed(place: int, *index: int, to: int) -> tuple[Any, ...]:
        args = arguments()
        args[place][index] = to
        return args

    for message, args in (
        ("draft_ids[1, 2]: expected a token id of at least 0, got -3", changed(0, 1, 2, to=-3)),
        ("retrieve_index[0, 6]: expected 0 to 13, got 14 (the target has 14 rows)", changed(1, 0, 6, to=14)),
        ("retrieve_next_token[1, 3]: expected -1 or another node, 1 to 6, got 7", changed(2, 1, 3, to=7)),
        ("retrieve_next_sibling[0, 2]: expected -1 or another node, 1 to 6, got 2", changed(3, 0, 2, to=2)),
    ):
        check_debug_error(OP, f"verify_greedy: {message}", *args)
