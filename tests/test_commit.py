"""commit: the cut at the first stop id, and the seed of the next round, exactly."""

from __future__ import annotations

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
    random_tensor,
)
from head_cases import check_reads_nothing
from torch import Tensor
from tree_cases import INDICES, INT_MIN, on, places

OP = "commit"
WIDTH = 5


def arguments(batch: int = 3, rows: int = 20, backbone: int = 6, dtype: torch.dtype = torch.float32,
              device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.int64,) * 3) -> tuple[Any, ...]:
    """Request b accepted b tokens (of up to 4); ids are 10 * b + place, rows scattered."""
    place = torch.arange(WIDTH)
    accepted = torch.arange(batch) % WIDTH
    here = place <= accepted.unsqueeze(1)
    ids = torch.where(here, 10 * torch.arange(batch).unsqueeze(1) + place, -1)
    index = torch.where(here, (3 * torch.arange(batch).unsqueeze(1) + 7 * place) % rows, -1)
    hidden = random_tensor(rows, backbone, seed=5, dtype=dtype, device=device)
    return (*on(device, index.to(dtypes[0]), accepted.to(dtypes[1]), ids.to(dtypes[2])), hidden)


def expected(*args: Tensor, stop_ids: Tensor | None) -> tuple[list[Any], Tensor]:
    index, accepted, ids, hidden = args
    stops = [] if stop_ids is None else [s for s in stop_ids.tolist() if s >= 0]
    made, states = [], []
    for b in range(ids.size(0)):
        tokens = ids[b, : min(max(int(accepted[b]), 0), ids.size(1) - 1) + 1].tolist()
        stop_places = [i for i, token in enumerate(tokens) if token in stops]
        kept = tokens[: stop_places[0] + 1] if stop_places else tokens
        made.append((kept + [-1] * (ids.size(1) - len(kept)), len(kept), bool(stop_places), kept[-1]))
        states.append(hidden[min(max(int(index[b, len(kept) - 1]), 0), hidden.size(0) - 1)])
    return [list(column) for column in zip(*made)], torch.stack(states)


def check_against(args: tuple[Any, ...], stop_ids: Tensor | None) -> tuple[Tensor, ...]:
    got = call(OP, *args, stop_ids=stop_ids)
    exact, states = expected(*args, stop_ids=stop_ids)
    assert [r.tolist() for r in got[:4]] == exact
    assert_same_bits(got[4], states)
    assert [r.dtype for r in got[:4]] == [torch.int64, torch.int64, torch.bool, torch.int64]
    return got


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_number_of_accepted_tokens(device: str, implementation: str, dtype: torch.dtype, batch: int) -> None:
    args = arguments(batch, dtype=dtype, device=device)
    with forced(implementation):
        got = check_against(args, None)
    assert got[1].tolist() == [b + 1 for b in range(batch)]
    assert not got[2].any()
    for b in range(batch):  # the row that predicted the bonus is the last accepted node's
        assert_same_bits(got[4][b], args[3][args[0][b, b]])


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("dtype", INDICES)
@pytest.mark.parametrize("stop", range(WIDTH + 1))
def test_a_stop_at_every_place(device: str, implementation: str, dtype: torch.dtype, stop: int) -> None:
    """The stop id is kept, what follows is not; the seed is the stop id with the row that predicted it."""
    args = arguments(5, device=device)
    stop_ids = torch.tensor([999, 40 + stop], dtype=dtype, device=device)  # of the request that accepted 4
    with forced(implementation):
        output_ids, num_output, finished, seed_ids, seed_state = check_against(args, stop_ids)
    assert finished.tolist() == [False] * 4 + [stop < WIDTH]
    if stop < WIDTH:
        assert output_ids[4].tolist() == [40 + i for i in range(stop + 1)] + [-1] * (4 - stop)
        assert int(num_output[4]) == stop + 1 and int(seed_ids[4]) == 40 + stop
        assert_same_bits(seed_state[4], args[3][args[0][4, stop]])


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_the_first_of_several_stops(device: str, implementation: str) -> None:
    """The first by place in the output, not by place in stop_ids; one request's stops do not end another."""
    args = arguments(5, device=device)
    (stop_ids,) = on(device, [43, 41, 22, 30, 41])
    with forced(implementation):
        got = check_against(args, stop_ids)
    assert got[1].tolist() == [1, 2, 3, 1, 2]
    assert got[2].tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_padding_never_stops(device: str, implementation: str) -> None:
    """-1 behind the accepted ids is no token, and a -1 in stop_ids is no stop id; nor are stale ids behind."""
    args = arguments(5, device=device)
    args[2][2, 3] = 77  # behind the three ids of request 2
    args[2][1, 0] = -1
    for stops in ([-1], [-1, 77], [-1, INT_MIN]):
        with forced(implementation):
            got = check_against(args, *on(device, stops))
        assert not got[2].any() and got[1].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_no_stop_ids_in_the_list(device: str, implementation: str) -> None:
    args = arguments(device=device)
    with forced(implementation):
        one, two = call(OP, *args), call(OP, *args, stop_ids=torch.empty(0, dtype=torch.int32, device=device))
    for a, b in zip(one, two):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("which", range(3))
def test_index_dtypes(device: str, implementation: str, which: int) -> None:
    dtypes = [torch.int64] * 3
    dtypes[which] = torch.int32
    (stop_ids,) = on(device, [21])
    with forced(implementation):
        one = call(OP, *arguments(device=device, dtypes=tuple(dtypes)), stop_ids=stop_ids)
        two = call(OP, *arguments(device=device), stop_ids=stop_ids.int())
    for a, b in zip(one, two):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_out_of_range_is_clamped(device: str, implementation: str) -> None:
    args = arguments(5, device=device)
    args[1].copy_(torch.tensor([-1, 5, INT_MIN, 2**40, 2]))
    args[0].copy_(torch.tensor([[-1] * WIDTH, [20] * WIDTH, [-(2**40)] * WIDTH, [2**40] * WIDTH, [19] * WIDTH]))
    with forced(implementation):
        got = check_against(args, None)
    assert got[1].tolist() == [1, 5, 1, 5, 3]
    assert_same_bits(got[4], args[3][[0, 19, 0, 19, 19]])


@pytest.mark.parametrize(("device", "implementation"), places(OP))
def test_empty(device: str, implementation: str) -> None:
    index, accepted, ids, hidden = arguments(2, device=device)
    with forced(implementation):
        got = call(OP, index[:0], accepted[:0], ids[:0], hidden[:0])
        narrow = call(OP, index[:, :1], accepted, ids[:, :1], hidden[:, :0])
    assert [list(r.shape) for r in got] == [[0, WIDTH], [0], [0], [0], [0, 6]]
    assert narrow[0].tolist() == [[0], [10]] and list(narrow[4].shape) == [2, 0]


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_seed_state_is_a_copy_of_the_bits(device: str, implementation: str, dtype: torch.dtype) -> None:
    args = arguments(2, dtype=dtype, device=device)
    args[3][int(args[0][0, 0])] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-7, 0.0])
    with forced(implementation):
        state = call(OP, *args)[4]
    assert_same_bits(state[0], args[3][int(args[0][0, 0])])
    assert torch.signbit(state[0, 3])


@pytest.mark.parametrize(("device", "implementation"), places(OP))
@pytest.mark.parametrize(("stops", "dtype"), [(True, torch.bfloat16), (True, torch.float16), (False, torch.float32)])
def test_contract(device: str, implementation: str, stops: bool, dtype: torch.dtype) -> None:
    kwargs = {"stop_ids": torch.tensor([21, 3, -1], device=device)} if stops else {}
    with forced(implementation):
        check_everything(OP, *arguments(dtype=dtype, device=device), **kwargs)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    check_compiled(OP, *arguments(device=device), stop_ids=torch.tensor([21, 3], device=device))


def test_reads_nothing() -> None:
    check_reads_nothing(OP, *arguments(), stop_ids=torch.tensor([21, 3]))


def test_errors() -> None:
    index, accepted, ids, hidden = arguments()
    shape = "(accept_index is [3, 5])"
    for message, *args in (
        ("accept_index: expected 2 dimensions, got 1 ([5])", index[0], accepted, ids, hidden),
        ("accept_index: expected int32 or int64, got float32", index.float(), accepted, ids, hidden),
        ("accept_index: expected at least 1 column, got 0", index[:, :0], accepted, ids[:, :0], hidden),
        (f"num_accepted: expected [3], got [2] {shape}", index, accepted[:2], ids, hidden),
        ("num_accepted: expected int32 or int64, got float32", index, accepted.float(), ids, hidden),
        (f"accept_ids: expected [3, 5], got [3, 4] {shape}", index, accepted, ids[:, :4], hidden),
        ("accept_ids: expected int32 or int64, got float32", index, accepted, ids.float(), hidden),
        ("target_hidden: expected 2 dimensions, got 3 ([1, 20, 6])", index, accepted, ids, hidden[None]),
        ("target_hidden: expected bfloat16 or float16 or float32, got float64", index, accepted, ids, hidden.double()),
        (f"target_hidden: expected at least 1 row, got 0 {shape}", index, accepted, ids, hidden[:0]),
        ("target_hidden: expected a contiguous last dimension, got strides [1, 20]", index, accepted, ids,
         hidden.t().contiguous().t()),
    ):
        check_error(OP, f"commit: {message}", *args)
    args = [index, accepted, ids, hidden]
    check_error(OP, "commit: stop_ids: expected 1 dimensions, got 2 ([1, 2])", *args, stop_ids=torch.tensor([[1, 2]]))
    check_error(OP, "commit: stop_ids: expected int32 or int64, got float32", *args, stop_ids=torch.tensor([1.0]))


def test_device_errors() -> None:
    check_device_errors(OP, *arguments(), stop_ids=torch.tensor([1]))


def test_debug_names_the_first_offender() -> None:
    def changed(place: int, *index: int, to: float) -> tuple[Any, ...]:
        args = arguments()
        args[3][1] = torch.nan  # a row that nobody accepted
        args[place][index] = to
        return args

    for message, args in (
        ("num_accepted[2]: expected 0 to 4, got 5 (accept_ids has 5 columns)", changed(1, 2, to=5)),
        ("accept_index[1, 1]: expected 0 to 19, got 20 (target_hidden has 20 rows)", changed(0, 1, 1, to=20)),
        ("accept_ids[2, 2]: expected a token id of at least 0, got -1", changed(2, 2, 2, to=-1)),
        ("target_hidden[13, 2]: expected a finite value, got inf", changed(3, 13, 2, to=torch.inf)),
    ):
        check_debug_error(OP, f"commit: {message}", *args)
