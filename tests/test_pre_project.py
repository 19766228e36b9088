"""pre_project against fp64, its rounding, its ids and rows out of range, vocabulary shards, and its errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_cases import check_rows_alone, check_threads
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
    check_numerics,
    forced,
    implementations,
    random_tensor,
    restrided,
    to64,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_kernels.reference.pre_project import pre_project as reference

OP = "pre_project"
SCALE = 39.191835884530846  # sqrt(1536): no dtype of FLOATS holds it
ABSENT = [-1, -(2**31), 2**31 - 1, 2**32, 2**40, -(2**63), 2**63 - 1]


def arguments(batch: int = 2, rows: int = 3, backbone: int = 24, hidden: int = 20, vocab: int = 50,
              dtype: torch.dtype = torch.float32, device: str = "cpu", ids: torch.dtype = torch.int64
              ) -> tuple[Any, ...]:
    token_ids = torch.randint(vocab, (batch, rows), generator=torch.Generator().manual_seed(1)).to(device, ids)
    embed_weight = random_tensor(vocab, backbone, seed=2, dtype=dtype, device=device, scale=1 / SCALE)
    state = random_tensor(batch, rows, backbone, seed=3, dtype=dtype, device=device)
    weight = random_tensor(hidden, 2 * backbone, seed=4, dtype=dtype, device=device, scale=(2 * backbone) ** -0.5)
    return token_ids, embed_weight, SCALE, state, weight


def naive(token_ids: Tensor, embed_weight: Tensor, embed_scale: float, state: Tensor | None, weight: Tensor, *,
          row_index: Tensor | None = None, vocab_start: int = 0) -> Tensor:
    """The formula row by row, in the dtype of its inputs (the embedding's product in fp32, as the contract says)."""
    batch, rows = token_ids.shape
    shard, backbone = embed_weight.shape
    product = torch.promote_types(embed_weight.dtype, torch.float32)
    x = embed_weight.new_zeros(batch, rows, 2 * backbone)
    for b in range(batch):
        for r in range(rows):
            local = int(token_ids[b, r]) - vocab_start
            if 0 <= local < shard:
                x[b, r, :backbone] = (embed_weight[local].to(product) * embed_scale).to(embed_weight.dtype)
            if state is not None:
                row = r if row_index is None else min(max(int(row_index[b, r]), 0), state.size(1) - 1)
                x[b, r, backbone:] = state[b, row]
    return F.linear(x, weight)


def oracle(token_ids: Tensor, embed_weight: Tensor, embed_scale: float, state: Tensor | None, weight: Tensor,
           **kwargs: Any) -> Tensor:
    """The result in fp64 from the embedding rounded once, as the contract wants it: a kernel must not round elsewhere.

    The reference must agree with the row by row formula here, or both it and the kernels could be wrong together.
    """
    rounded = (embed_weight.float() * embed_scale).to(embed_weight.dtype).double()
    exact = reference(token_ids, rounded, 1.0, to64(state), weight.double(), **kwargs)
    again = naive(token_ids, rounded, 1.0, to64(state), weight.double(), **kwargs)
    torch.testing.assert_close(exact, again, rtol=1e-12, atol=1e-12)
    return exact


def check_call(*args: Any, **kwargs: Any) -> None:
    check_numerics(call(OP, *args, **kwargs), naive(*args, **kwargs), oracle(*args, **kwargs), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("batch, rows", [(1, 1), (2, 3), (5, 1), (0, 2), (2, 0)])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, batch: int, rows: int) -> None:
    args = arguments(batch, rows, 72, 40, dtype=dtype, device=device)
    with forced(implementation):
        check_call(*args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch, rows", [(1, 1), (10, 2), (2, 35)])  # 16 rows share weights, 32, 64
def test_a_wide_product(device: str, implementation: str, dtype: torch.dtype, batch: int, rows: int) -> None:
    # Broken last blocks of columns and of K, and a shorter last split.
    ids, embed, scale, state, weight = arguments(batch, rows, 520, 520, dtype=dtype, device=device)
    ids[0, -1], row = 10**9, torch.full((batch, rows), rows - 1, device=device)
    far = (ids, restrided(embed, [0], 8), scale, restrided(state, [1, 0], 8), restrided(weight, [0], 8))
    with forced(implementation):
        check_call(*far, row_index=row)
        check_call(*far[:3], None, far[4])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_row_index(device: str, implementation: str, dtype: torch.dtype, index: torch.dtype) -> None:
    ids, embed, scale, _, weight = arguments(2, 3, dtype=dtype, device=device, ids=index)
    state = random_tensor(2, 4, 24, seed=7, dtype=dtype, device=device)
    other = torch.int32 if index == torch.int64 else torch.int64
    row = torch.tensor([[3, 0, 0], [1, 2, 3]], dtype=other, device=device)
    with forced(implementation):
        check_call(ids, embed, scale, state, weight, row_index=row)
        check_call(ids, embed, scale, state[:, :1], weight, row_index=row.clamp(max=0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_contract(device: str, implementation: str, dtype: torch.dtype) -> None:
    args = arguments(dtype=dtype, device=device)
    row = torch.tensor([[2, 0, 0], [1, 1, 2]], dtype=torch.int32, device=device)
    with forced(implementation):
        check_everything(OP, *args)
        check_everything(OP, *args, row_index=row, vocab_start=7)
        check_everything(OP, *args[:3], None, args[4])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_product_is_rounded_once_and_nothing_else_is(device: str, implementation: str, dtype: torch.dtype) -> None:
    # Neighbours of each other cancel exactly, so a scale or product in another precision shows in every digit.
    base = random_tensor(9, 16, seed=5, dtype=dtype, device=device)
    close = (base.float() * (1 + 2 * torch.finfo(dtype).eps)).to(dtype)
    embed = torch.stack((base, close), 2).flatten(1)  # [9, 32]: columns 2 i and 2 i + 1 are close
    weight = torch.zeros(16, 64, dtype=dtype, device=device)
    weight[torch.arange(16), 2 * torch.arange(16)] = 1
    weight[torch.arange(16), 2 * torch.arange(16) + 1] = -1
    ids = torch.arange(9, device=device).view(3, 3)
    scale = torch.tensor(SCALE, dtype=torch.float32, device=device)
    rounded = (embed.float() * scale).to(dtype)
    expected = (rounded[:, 0::2].float() - rounded[:, 1::2].float()).to(dtype).view(3, 3, 16)
    for wrong in (embed.float() * scale, embed * scale.to(dtype)):
        differs = (wrong[:, 0::2].float() - wrong[:, 1::2].float()).to(dtype).view(3, 3, 16) != expected
        assert dtype == torch.float32 or differs.any()
    with forced(implementation):
        assert_same_bits(call(OP, ids, embed, SCALE, None, weight), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_ids_of_other_shards_and_out_of_range_contribute_nothing(device: str, implementation: str) -> None:
    _, embed, scale, _, weight = arguments(device=device)
    embed[[0, -1]] = torch.nan  # an absent id that reads some row for nothing would most likely take an end
    ids = torch.tensor([ABSENT], device=device)
    state = random_tensor(1, ids.size(1), 24, seed=6, device=device)
    alone = naive(ids, embed, scale, state, weight)
    with forced(implementation):
        for start in (0, 1000, 2**31 + 5, 2**62):
            near = torch.tensor([[start - 1, start + 50, *ABSENT[2:]]], device=device)
            near = torch.where((near >= start) & (near < start + 50), -1, near)
            for absent in (ids, near):
                torch.testing.assert_close(call(OP, absent, embed, scale, state, weight, vocab_start=start), alone)
        narrow = ids.clamp(-(2**31), 2**31 - 1).int()
        torch.testing.assert_close(call(OP, narrow, embed, scale, state, weight), alone)
        # The differences that would land in the shard if they were taken in 32 or 64 bits and wrapped around.
        for wrapping, start in ((narrow.fill_(-(2**31)), 2**31 - 1), (ids.fill_(-(2**63)), 2**63 - 1)):
            torch.testing.assert_close(call(OP, wrapping, embed, scale, state, weight, vocab_start=start), alone)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_row_index_is_clamped(device: str, implementation: str, index: torch.dtype) -> None:
    _, embed, scale, _, weight = arguments(device=device)
    ids = torch.zeros(2, 4, dtype=torch.int64, device=device)
    state = random_tensor(2, 3, 24, seed=6, device=device)
    huge = 2**31 - 1 if index == torch.int32 else 2**40
    row = torch.tensor([[-1, 3, 1, 0], [-(2**31), huge, 2, 3]], dtype=index, device=device)
    clamped = torch.tensor([[0, 2, 1, 0], [0, 2, 2, 2]], device=device)
    with forced(implementation):
        assert_same_bits(call(OP, ids, embed, scale, state, weight, row_index=row),
                         call(OP, ids, embed, scale, state, weight, row_index=clamped))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_without_state_only_the_left_half_counts(device: str, implementation: str, dtype: torch.dtype) -> None:
    ids, embed, scale, _, weight = arguments(dtype=dtype, device=device)
    weight[:, 24:] = torch.nan
    row = torch.full((2, 3), 99, device=device)
    exact = oracle(ids, embed, scale, None, weight.nan_to_num(0))
    with forced(implementation):
        got = call(OP, ids, embed, scale, None, weight)
        check_numerics(got, naive(ids, embed, scale, None, weight.nan_to_num(0)), exact, atol=1e-6)
        assert_same_bits(call(OP, ids, embed, scale, None, weight, row_index=row), got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_shards_of_the_vocabulary_add_up(device: str, implementation: str, dtype: torch.dtype) -> None:
    ids, embed, scale, state, weight = arguments(3, 4, dtype=dtype, device=device)
    row = torch.tensor([[0, 0, 3, 2]] * 3, device=device)
    cuts = [0, 17, 18, 50]
    with forced(implementation):
        parts = [
            call(OP, ids, embed[a:b], scale, state if i == 1 else None, weight, row_index=row, vocab_start=a)
            for i, (a, b) in enumerate(pairwise(cuts))
        ]
        empty = call(OP, ids, embed[:0], scale, None, weight, vocab_start=50)
    assert not empty.any()
    whole = oracle(ids, embed, scale, state, weight, row_index=row)
    summands = torch.stack(parts).double()
    # Each part is rounded to its own dtype, and sums in fp32 differ in their order by no more than fp32's own error.
    allowed = summands.abs().sum(0) * torch.finfo(dtype).eps / 2 + 1e-6
    assert ((summands.sum(0) - whole).abs() <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_wanted_rows_of_the_table_are_read(device: str, implementation: str, dtype: torch.dtype) -> None:
    _, embed, scale, state, weight = arguments(1, 3, dtype=dtype, device=device)
    endless = embed[:1].expand(2**40, 24)  # anything that widens or copies this table runs out of memory
    ids = torch.tensor([[0, 2**40 - 1, 2**35 + 1]], device=device)
    with forced(implementation):
        got = call(OP, ids, endless, scale, state, weight)
        assert_same_bits(got, call(OP, ids * 0, embed, scale, state, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offsets_beyond_int32(device: str, implementation: str, dtype: torch.dtype) -> None:
    args = arguments(2, 3, vocab=4, hidden=3, dtype=dtype, device=device)
    buffer = torch.empty(2**31 + 2**20, dtype=dtype, device=device)  # mostly never touched
    for place, tensor in ((1, args[1]), (3, args[3]), (4, args[4])):
        stride = 2**31 // (tensor.size(0) - 1)
        strides = (stride, 512, 1) if tensor.dim() == 3 else (stride, 1)
        far = buffer.as_strided(tensor.shape, strides).copy_(tensor)
        with forced(implementation):
            assert_same_bits(call(OP, *args[:place], far, *args[place + 1 :]), call(OP, *args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 3)),
    priority=st.permutations(range(2)),
    gap=st.integers(0, 3),
    start=st.integers(0, 60),
    seed=st.integers(0, 2**31),
    index=st.sampled_from([torch.int32, torch.int64]),
    with_state=st.booleans(),
)
def test_any_shape_and_strides(device: str, implementation: str, sizes: tuple[int, int, int], priority: list[int],
                               gap: int, start: int, seed: int, dtype: torch.dtype, index: torch.dtype,
                               with_state: bool) -> None:
    batch, rows, prev_rows = sizes
    _, embed, scale, _, weight = arguments(dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(start - 5, start + 55, (batch, rows), generator=generator).to(device, index)
    row = torch.randint(-1, prev_rows + 1, (batch, rows), generator=generator).to(device)
    state = random_tensor(batch, prev_rows, 24, seed=seed, dtype=dtype, device=device) if with_state else None
    args = (ids, embed, scale, state, weight)
    far = [restrided(a, priority, gap) if isinstance(a, Tensor) else a for a in args]
    with forced(implementation):
        got = call(OP, *far, row_index=restrided(row, priority, gap), vocab_start=start)
    kwargs: Any = {"row_index": row, "vocab_start": start}
    check_numerics(got, naive(*args, **kwargs), oracle(*args, **kwargs), atol=1e-6)


@pytest.mark.kernels_only
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_does_not_depend_on_the_batch(device: str, implementation: str, dtype: torch.dtype) -> None:
    sizes = ((72, 40), (1536, 256), (2560, 256), (2816, 1024), (1000, 768))
    for backbone, hidden in sizes if device == "cuda" else sizes[:1]:
        args = arguments(150, 1, backbone, hidden, dtype=dtype, device=device)
        check_rows_alone(OP, implementation, args, (0, 3))


@pytest.mark.parametrize("implementation", ["cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cpu_bits_depend_on_neither_threads_nor_batch(implementation: str, dtype: torch.dtype) -> None:
    for backbone, hidden in ((264, 1000), (256, 90), (21, 333)):  # whole and broken vectors, and groups of weight rows
        args = arguments(150, 1, backbone, hidden, dtype=dtype)
        check_threads(OP, implementation, args)
        check_rows_alone(OP, implementation, args, (0, 3))


def test_compiled_equals_eager() -> None:
    args = arguments(dtype=torch.bfloat16)
    check_compiled(OP, *args)
    check_compiled(OP, *args[:3], None, args[4])
    check_compiled(OP, *args, row_index=torch.tensor([[2, 0, 0], [1, 1, 2]], dtype=torch.int32), vocab_start=7)


def test_errors() -> None:
    ids, embed, scale, state, weight = arguments()
    row = torch.zeros(2, 3, dtype=torch.int64)

    check_error(OP, "pre_project: token_ids: expected 2 dimensions, got 1 ([6])", ids.flatten(), embed, scale, state,
                weight)
    check_error(OP, "pre_project: token_ids: expected int32 or int64, got int16", ids.short(), embed, scale, state,
                weight)
    check_error(OP, "pre_project: embed_weight: expected 2 dimensions, got 1 ([24])", ids, embed[0], scale, state,
                weight)
    check_error(OP, "pre_project: embed_weight: expected bfloat16 or float16 or float32, got float64", ids,
                embed.double(), scale, state, weight)
    check_error(OP, "pre_project: weight: expected [*, 48], got [20, 24] (embed_weight has 24 columns)", ids, embed,
                scale, None, weight[:, :24])
    check_error(OP, "pre_project: weight: expected float32, got bfloat16 (embed_weight is float32)", ids, embed, scale,
                state, weight.bfloat16())
    check_error(OP, "pre_project: row_index: expected [2, 3], got [2, 2] (token_ids is [2, 3])", ids, embed, scale,
                state, weight, row_index=row[:, :2])
    check_error(OP, "pre_project: row_index: expected int32 or int64, got float32", ids, embed, scale, state, weight,
                row_index=row.float())
    why = "(token_ids is [2, 3], embed_weight has 24 columns)"
    check_error(OP, f"pre_project: state: expected [2, 3, 24], got [2, 1, 24] {why}", ids, embed, scale, state[:, :1],
                weight)
    check_error(OP, f"pre_project: state: expected [2, *, 24], got [1, 3, 24] {why}", ids, embed, scale, state[:1],
                weight, row_index=row)
    check_error(OP, f"pre_project: state: expected [2, 3, 24], got [2, 3, 20] {why}", ids, embed, scale,
                state[..., :20], weight)
    check_error(OP, "pre_project: state: expected float32, got float16 (embed_weight is float32)", ids, embed, scale,
                state.half(), weight)
    check_error(OP, "pre_project: state: expected at least 1 row a request, got 0 (row_index has to name one)", ids,
                embed, scale, state[:, :0], weight, row_index=row)
    check_error(OP, "pre_project: vocab_start: expected at least 0, got -1", ids, embed, scale, state, weight,
                vocab_start=-1)


def test_stride_and_device_errors() -> None:
    args = arguments()
    row = torch.zeros(2, 3, dtype=torch.int64)
    check_device_errors(OP, *args, row_index=row)
    for place, name in ((0, "token_ids"), (1, "embed_weight"), (3, "state"), (4, "weight")):
        turned = args[place].transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)
        got = "[" + ", ".join(map(str, turned.stride())) + "]"
        check_error(OP, f"pre_project: {name}: expected a contiguous last dimension, got strides {got}", *args[:place],
                    turned, *args[place + 1 :])
    check_error(OP, "pre_project: row_index: expected a contiguous last dimension, got strides [1, 2]", *args,
                row_index=row.view(3, 2).t())


def test_debug_names_the_first_offender() -> None:
    ids, embed, scale, state, weight = arguments(dtype=torch.float16)
    ids = ids.clamp(1, 40)
    bad = ids.clone()
    bad[1, 2] = -7
    check_debug_error(OP, "pre_project: token_ids[1, 2]: expected at least 0, got -7", bad, embed, scale, state, weight)
    for place, value in ((49, torch.nan), (48, 2000.0)):  # the second is finite, its product with the scale is not
        embed[place] = value
        bad[1, 2] = place
        check_debug_error(OP, "pre_project: token_ids[1, 2]: expected an id whose scaled embedding is finite, "
                          f"got {place}", bad, embed, scale, state, weight)
    row = torch.tensor([[0, 1, 2], [2, 3, -1]], dtype=torch.int32)
    check_debug_error(OP, "pre_project: row_index[1, 1]: expected 0 to 2, got 3 (state has 3 rows)", ids, embed, scale,
                      state, weight, row_index=row)
    state[1, 0, 5] = -torch.inf
    check_debug_error(OP, "pre_project: state[1, 0, 5]: expected a finite value, got -inf", ids, embed, scale, state,
                      weight)
    weight[3, 4] = torch.nan
    check_debug_error(OP, "pre_project: weight[3, 4]: expected a finite value, got nan", ids, embed, scale, None,
                      weight)
