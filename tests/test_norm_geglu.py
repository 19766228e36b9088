"""norm_geglu against fp64, extreme gates, and its errors."""

from __future__ import annotations

import math
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

from mtp_kernels.reference.norm_geglu import norm_geglu as reference

OP = "norm_geglu"


def arguments(leading: tuple[int, ...] = (3,), inner: int = 48, intermediate: int = 20,
              dtype: torch.dtype = torch.float32, device: str = "cpu", norm_dtype: torch.dtype | None = None,
              seed: int = 1) -> tuple[Any, ...]:
    x = random_tensor(*leading, inner, seed=seed, dtype=dtype, device=device)
    norm = random_tensor(inner, seed=2, dtype=norm_dtype or dtype, device=device)
    weight = random_tensor(2 * intermediate, inner, seed=3, dtype=dtype, device=device, scale=2 * inner**-0.5)
    return x, norm, 1e-6, weight


def naive(x: Tensor, norm: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """The formula spelled out, in the dtype of `x`."""
    half = gate_up_weight.size(0) // 2
    normed = F.rms_norm(x, (x.size(-1),), norm.to(x.dtype), eps)
    g, u = F.linear(normed, gate_up_weight[:half]), F.linear(normed, gate_up_weight[half:])
    return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g * g * g))) * u


def oracle(*args: Any) -> Tensor:
    """The reference in fp64, which must be the formula: else it and the kernels could be wrong together."""
    exact = reference(*map(to64, args))
    torch.testing.assert_close(exact, naive(*map(to64, args)), rtol=1e-12, atol=1e-12)
    return exact


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (0,), ()])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    args = arguments(leading, 200, 72, dtype, device)
    with forced(implementation):
        check_numerics(call(OP, *args), naive(*args), oracle(*args), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("leading", [(1,), (20,), (2, 35)])  # 16 rows share weights, 32, 64
def test_a_wide_product(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    for inner, intermediate in ((520, 136), (640, 72)):  # a broken and a whole last block of K
        args = arguments(leading, inner, intermediate, dtype, device)
        far = (restrided(args[0], [1, 0], 8), *args[1:3], restrided(args[3], [0], 8))
        with forced(implementation):
            check_numerics(call(OP, *far), naive(*args), oracle(*args), atol=1e-6)


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
        check_numerics(call(OP, *args), naive(*args), oracle(*args), atol=1e-6)
        check_everything(OP, *args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_gate_comes_first(device: str, implementation: str, dtype: torch.dtype) -> None:
    x = torch.ones(1, 2, dtype=dtype, device=device)
    weight = torch.tensor([[8.0, 8.0], [-8.0, -8.0], [0.5, 0.0], [0.5, 0.0]], dtype=dtype, device=device)
    with forced(implementation):
        got = call(OP, x, x[0], 0.0, weight)  # gates 16 and -16, ups 0.5: gelu is the identity and zero there
    assert got.tolist() == [[8.0, 0.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_gates_give_no_nan(device: str, implementation: str, dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, dtype=dtype, device=device)
    gates = torch.tensor([[1e18], [-1e18], [1e38], [-1e38], [0.0]], dtype=dtype, device=device)  # their cubes overflow
    ups = torch.full_like(gates, 0.5)
    with forced(implementation):
        got = call(OP, x, x[0], 0.0, torch.cat((gates, ups)))
    assert_same_bits(got, (gates.clamp(min=0) * 0.5).t().contiguous())


@pytest.mark.parametrize("implementation", ["cpu"])
def test_cpu_gelu_over_its_range(implementation: str) -> None:
    gate = torch.cat((torch.linspace(-13, 13, 20001), torch.tensor([1e-30, -1e-30, 1e19, -1e19, 3e38, -3e38])))
    weight = torch.cat((gate, torch.ones_like(gate))).unsqueeze(1)
    wide = gate.double()
    twice = math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3)  # 1 + tanh(z) = 2 sigmoid(2 z), which does not cancel
    exact = wide * torch.sigmoid(twice)
    with forced(implementation):
        got = call(OP, torch.ones(1), torch.ones(1), 0.0, weight)
    # A rounding or two of 2 z, and of everything behind it; below e^-87 the result may be 0.
    units = 2 + torch.sigmoid(-twice) * (2 + 2 * twice.abs())
    assert ((got - exact).abs() <= torch.finfo(torch.float32).eps * units * exact.abs() + 1e-36).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_zero_rows_stay_zero(device: str, implementation: str) -> None:
    x, norm, eps, weight = arguments(device=device)
    with forced(implementation):
        assert not call(OP, x * 0, norm, eps, weight).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offsets_beyond_int32(device: str, implementation: str, dtype: torch.dtype) -> None:
    x, norm, eps, weight = arguments(intermediate=2, dtype=dtype, device=device)
    buffer = torch.empty(2**31 + 64, dtype=dtype, device=device)  # mostly never touched
    far_x = buffer.as_strided(x.shape, (2**30, 1)).copy_(x)
    with forced(implementation):
        expected = call(OP, x, norm, eps, weight)
        assert_same_bits(call(OP, far_x, norm, eps, weight), expected)
        far_weight = buffer.as_strided(weight.shape, (2**31 // 3, 1)).copy_(weight)
        assert_same_bits(call(OP, x, norm, eps, far_weight), expected)


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
    args = (far, restrided(norm, priority, gap), eps, restrided(weight, priority, gap))
    with forced(implementation):
        got = call(OP, *args)
    assert got.is_contiguous()
    plain = (far.contiguous(), norm, eps, weight)
    check_numerics(got, naive(*plain), oracle(*plain), atol=1e-6)


@pytest.mark.kernels_only
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_does_not_depend_on_the_batch(device: str, implementation: str, dtype: torch.dtype) -> None:
    sizes = ((72, 40), (256, 2048), (256, 1000), (768, 200), (1024, 8192))
    for inner, intermediate in sizes if device == "cuda" else sizes[:1]:
        args = arguments((150,), inner, intermediate, dtype, device)
        check_rows_alone(OP, implementation, args, (0,))


@pytest.mark.parametrize("implementation", ["cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cpu_bits_depend_on_neither_threads_nor_batch(implementation: str, dtype: torch.dtype) -> None:
    for inner, intermediate in ((264, 1000), (256, 90), (21, 333)):  # whole and broken vectors, and groups of rows
        args = arguments((150,), inner, intermediate, dtype)
        check_threads(OP, implementation, args)
        check_rows_alone(OP, implementation, args, (0,))


def test_compiled_equals_eager() -> None:
    check_compiled(OP, *arguments((2, 3), dtype=torch.bfloat16))


def test_errors() -> None:
    x, norm, eps, weight = arguments()
    check_error(OP, "norm_geglu: x: expected at least 1 dimensions, got 0 ([])", x.new_empty(()), norm, eps, weight)
    check_error(OP, "norm_geglu: x: expected bfloat16 or float16 or float32, got float64", x.double(), norm, eps,
                weight)
    check_error(OP, "norm_geglu: norm_weight: expected [48], got [47] (x has 48 columns)", x, norm[:47], eps, weight)
    check_error(OP, "norm_geglu: norm_weight: expected float32, got float16 (x is float32)", x, norm.half(), eps,
                weight)
    check_error(OP, "norm_geglu: norm_weight: expected bfloat16 or float32, got float16 (x is bfloat16)", x.bfloat16(),
                norm.half(), eps, weight.bfloat16())
    check_error(OP, "norm_geglu: gate_up_weight: expected [*, 48], got [40, 47] (x has 48 columns)", x, norm, eps,
                weight[:, :47])
    check_error(OP, "norm_geglu: gate_up_weight: expected an even number of rows, got 39 "
                "(the gate's, then as many of up)", x, norm, eps, weight[:39])
    check_error(OP, "norm_geglu: gate_up_weight: expected float32, got bfloat16 (x is float32)", x, norm, eps,
                weight.bfloat16())
    check_error(OP, "norm_geglu: x: expected a contiguous last dimension, got strides [1, 3]", x.t().contiguous().t(),
                norm, eps, weight)
    check_error(OP, "norm_geglu: norm_weight: expected a contiguous last dimension, got strides [2]", x,
                norm.repeat(2)[::2], eps, weight)
    check_error(OP, "norm_geglu: gate_up_weight: expected a contiguous last dimension, got strides [1, 40]", x, norm,
                eps, weight.t().contiguous().t())
    check_device_errors(OP, x, norm, eps, weight)


def test_debug_names_the_first_offender() -> None:
    x, norm, eps, weight = arguments()
    weight[39, 3] = torch.nan
    check_debug_error(OP, "norm_geglu: gate_up_weight[39, 3]: expected a finite value, got nan", x, norm, eps, weight)
    norm[5] = torch.inf
    check_debug_error(OP, "norm_geglu: norm_weight[5]: expected a finite value, got inf", x, norm, eps, weight)
    x[1, 7] = -torch.inf
    check_debug_error(OP, "norm_geglu: x[1, 7]: expected a finite value, got -inf", x, norm, eps, weight)
