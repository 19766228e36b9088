"""post_project against fp64, which normed the state is of, and its errors."""

from __future__ import annotations

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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_kernels.ops import ArgumentError
from mtp_kernels.reference.post_project import post_project as reference

OP = "post_project"


def arguments(leading: tuple[int, ...] = (3,), inner: int = 48, backbone: int = 40, dtype: torch.dtype = torch.float32,
              device: str = "cpu", norm_dtype: torch.dtype | None = None, seed: int = 1) -> tuple[Any, ...]:
    x = random_tensor(*leading, inner, seed=seed, dtype=dtype, device=device)
    norm = random_tensor(inner, seed=2, dtype=norm_dtype or dtype, device=device)
    weight = random_tensor(backbone, inner, seed=3, dtype=dtype, device=device, scale=inner**-0.5)
    return x, norm, 1e-6, weight


def naive(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed = F.rms_norm(x, (x.size(-1),), norm.to(x.dtype), eps)
    return normed, F.linear(normed, weight)


def check_result(got: tuple[Tensor, Tensor], x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> None:
    """normed against fp64; the state against fp64 of the normed that came with it, as the contract says."""
    args = (x, norm, eps, weight)
    exact = reference(*map(to64, args))
    for one, two in zip(exact, naive(*map(to64, args))):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    normed, state = got
    plain = naive(*args)
    check_numerics(normed, plain[0], exact[0], atol=1e-6)
    check_numerics(state, plain[1], exact[1], atol=1e-6)
    check_numerics(state, F.linear(normed, weight), normed.double() @ weight.double().t(), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (0,), ()])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    args = arguments(leading, 200, 72, dtype, device)
    with forced(implementation):
        check_result(call(OP, *args), *args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("leading", [(1,), (20,), (2, 35)])  # 16 rows share weights, 32, 64
def test_a_wide_product(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    for inner, backbone in ((520, 136), (640, 72)):  # a broken and a whole last block of K
        args = arguments(leading, inner, backbone, dtype, device)
        far = (restrided(args[0], [1, 0], 8), *args[1:3], restrided(args[3], [0], 8))
        with forced(implementation):
            check_result(call(OP, *far), *args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_contract(device: str, implementation: str, dtype: torch.dtype) -> None:
    with forced(implementation):
        check_everything(OP, *arguments(dtype=dtype, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_weight_may_be_fp32(device: str, implementation: str, dtype: torch.dtype) -> None:
    args = arguments(dtype=dtype, device=device, norm_dtype=torch.float32)
    with forced(implementation):
        check_result(call(OP, *args), *args)
        check_everything(OP, *args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_state_is_of_the_rounded_normed(device: str, implementation: str, dtype: torch.dtype) -> None:
    # Each state entry is the difference of two close entries of normed: exact for rounded ones, and another otherwise.
    close = random_tensor(4, 16, seed=5, dtype=dtype, device=device)
    x = torch.stack((close, (close.float() * (1 + 2 * torch.finfo(dtype).eps)).to(dtype)), 2).flatten(1)  # [4, 32]
    weight = torch.zeros(16, 32, dtype=dtype, device=device)
    weight[torch.arange(16), 2 * torch.arange(16)] = 1
    weight[torch.arange(16), 2 * torch.arange(16) + 1] = -1
    norm = torch.full((32,), 0.7, dtype=dtype, device=device)
    with forced(implementation):
        normed, state = call(OP, x, norm, 1e-6, weight)
    expected = (normed[:, 0::2].float() - normed[:, 1::2].float()).to(dtype)
    unrounded = reference(*map(to64, (x, norm, 1e-6, weight)))[1].to(dtype)
    assert not torch.equal(expected, unrounded)
    assert_same_bits(state, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_zero_rows_stay_zero(device: str, implementation: str) -> None:
    x, norm, eps, weight = arguments(device=device)
    with forced(implementation):
        assert not any(result.any() for result in call(OP, x * 0, norm, eps, weight))


def test_outputs_may_share_a_buffer_but_no_element() -> None:
    args = arguments(inner=40)
    normed, state = call(OP, *args)
    buffer = torch.zeros(3, 80)
    torch.ops.mtp.post_project.out(*args, out_normed=buffer[:, :40], out_state=buffer[:, 40:])
    assert_same_bits(buffer, torch.cat((normed, state), 1))
    with pytest.raises(ArgumentError) as error:
        torch.ops.mtp.post_project.out(*args, out_normed=buffer[:, :40], out_state=buffer[:, 39:79])
    assert str(error.value) == "post_project: out_state: expected storage of its own, got memory of out_normed"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offsets_beyond_int32(device: str, implementation: str, dtype: torch.dtype) -> None:
    x, norm, eps, weight = arguments(backbone=3, dtype=dtype, device=device)
    buffer = torch.empty(2**31 + 64, dtype=dtype, device=device)  # mostly never touched
    with forced(implementation):
        expected = call(OP, x, norm, eps, weight)
        far_x = buffer.as_strided(x.shape, (2**30, 1)).copy_(x)
        for one, two in zip(call(OP, far_x, norm, eps, weight), expected):
            assert_same_bits(one, two)
        far_weight = buffer.as_strided(weight.shape, (2**30, 1)).copy_(weight)
        for one, two in zip(call(OP, x, norm, eps, far_weight), expected):
            assert_same_bits(one, two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    priority=st.permutations(range(3)),
    gap=st.integers(0, 3),
    broadcast=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(leading=[2, 3], priority=[1, 0, 2], gap=1, broadcast=False, seed=1)
def test_any_leading_shape_and_strides(device: str, implementation: str, leading: list[int], priority: list[int],
                                       gap: int, broadcast: bool, seed: int, dtype: torch.dtype) -> None:
    x, norm, eps, weight = arguments(tuple(leading), dtype=dtype, device=device, seed=seed)
    far = restrided(x, priority, gap)
    if broadcast and x.numel():
        far = far[(slice(0, 1),) * len(leading)].expand(x.shape)
    with forced(implementation):
        got = call(OP, far, restrided(norm, priority, gap), eps, restrided(weight, priority, gap))
    check_result(got, far.contiguous(), norm, eps, weight)
    assert all(result.is_contiguous() for result in got)


@pytest.mark.kernels_only
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_does_not_depend_on_the_batch(device: str, implementation: str, dtype: torch.dtype) -> None:
    sizes = ((72, 40), (256, 2560), (768, 200), (1024, 5376))
    for inner, backbone in sizes if device == "cuda" else sizes[:1]:
        args = arguments((150,), inner, backbone, dtype, device)
        check_rows_alone(OP, implementation, args, (0,))


@pytest.mark.parametrize("implementation", ["cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cpu_bits_depend_on_neither_threads_nor_batch(implementation: str, dtype: torch.dtype) -> None:
    for inner, out in ((264, 1000), (256, 90), (21, 333)):  # whole and broken vectors, and groups of weight rows
        args = arguments((150,), inner, out, dtype)
        check_threads(OP, implementation, args)
        check_rows_alone(OP, implementation, args, (0,))


def test_compiled_equals_eager() -> None:
    check_compiled(OP, *arguments((2, 3), dtype=torch.bfloat16))


def test_errors() -> None:
    x, norm, eps, weight = arguments()
    check_error(OP, "post_project: x: expected at least 1 dimensions, got 0 ([])", x.new_empty(()), norm, eps, weight)
    check_error(OP, "post_project: x: expected bfloat16 or float16 or float32, got float64", x.double(), norm, eps,
                weight)
    check_error(OP, "post_project: norm_weight: expected [48], got [47] (x has 48 columns)", x, norm[:47], eps, weight)
    check_error(OP, "post_project: norm_weight: expected float32, got bfloat16 (x is float32)", x, norm.bfloat16(), eps,
                weight)
    check_error(OP, "post_project: weight: expected [*, 48], got [40, 47] (x has 48 columns)", x, norm, eps,
                weight[:, :47])
    check_error(OP, "post_project: weight: expected float32, got float16 (x is float32)", x, norm, eps, weight.half())
    check_error(OP, "post_project: x: expected a contiguous last dimension, got strides [1, 3]", x.t().contiguous().t(),
                norm, eps, weight)
    check_error(OP, "post_project: norm_weight: expected a contiguous last dimension, got strides [2]", x,
                norm.repeat(2)[::2], eps, weight)
    check_error(OP, "post_project: weight: expected a contiguous last dimension, got strides [1, 40]", x, norm, eps,
                weight.t().contiguous().t())
    check_device_errors(OP, x, norm, eps, weight)


def test_debug_names_the_first_offender() -> None:
    x, norm, eps, weight = arguments()
    weight[39, 3] = torch.nan
    check_debug_error(OP, "post_project: weight[39, 3]: expected a finite value, got nan", x, norm, eps, weight)
    norm[5] = torch.inf
    check_debug_error(OP, "post_project: norm_weight[5]: expected a finite value, got inf", x, norm, eps, weight)
    x[1, 7] = -torch.inf
    check_debug_error(OP, "post_project: x[1, 7]: expected a finite value, got -inf", x, norm, eps, weight)
