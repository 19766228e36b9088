"""linear_norm_add against fp64, its scale, and its errors."""

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

from mtp_kernels.reference.linear_norm_add import linear_norm_add as reference

OP = "linear_norm_add"


def arguments(leading: tuple[int, ...] = (3,), inner: int = 48, out: int = 40, dtype: torch.dtype = torch.float32,
              device: str = "cpu", norm_dtype: torch.dtype | None = None, projected: bool = False, seed: int = 1
              ) -> tuple[Any, ...]:
    x = random_tensor(*leading, out if projected else inner, seed=seed, dtype=dtype, device=device)
    norm = random_tensor(out, seed=2, dtype=norm_dtype or dtype, device=device)
    weight = random_tensor(out, inner, seed=3, dtype=dtype, device=device, scale=inner**-0.5)
    residual = random_tensor(*leading, out, seed=seed + 1, dtype=dtype, device=device)
    return x, None if projected else weight, norm, 1e-6, residual


def scales(dtype: torch.dtype, device: str = "cpu") -> list[Tensor | None]:
    one = torch.full((1,), 0.7, device=device)
    return [None, one, one.to(dtype), one.reshape(()), one.to(dtype).reshape(1, 1, 1)]


def naive(x: Tensor, weight: Tensor | None, norm: Tensor, eps: float, residual: Tensor, *, scale: Tensor | None = None
          ) -> Tensor:
    """The formula in plain PyTorch, in the dtype of `x`."""
    projected = x if weight is None else F.linear(x, weight)
    y = residual + F.rms_norm(projected, (projected.size(-1),), norm.to(x.dtype), eps)
    return y if scale is None else y * scale.reshape(()).to(x.dtype)


def oracle(*args: Any, scale: Tensor | None = None) -> Tensor:
    """The reference in fp64, which must be the formula: else it and the kernels could be wrong together."""
    exact = reference(*map(to64, args), scale=to64(scale))
    torch.testing.assert_close(exact, naive(*map(to64, args), scale=to64(scale)), rtol=1e-12, atol=1e-12)
    return exact


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (0,), ()])
@pytest.mark.parametrize("projected", [False, True])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...], projected: bool
                      ) -> None:
    args = arguments(leading, 200, 72, dtype, device, projected=projected)
    for scale in scales(dtype, device):
        with forced(implementation):
            got = call(OP, *args, scale=scale)
        check_numerics(got, naive(*args, scale=scale), oracle(*args, scale=scale), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("leading", [(1,), (20,), (2, 35)])  # 16 rows share weights, 32, 64
def test_a_wide_product(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    args = arguments(leading, 1160, 520, dtype, device)  # broken last blocks of columns and of K, a shorter last split
    far = (restrided(args[0], [1, 0], 8), restrided(args[1], [0], 8), *args[2:])
    with forced(implementation):
        check_numerics(call(OP, *far), naive(*args), oracle(*args), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_contract(device: str, implementation: str, dtype: torch.dtype) -> None:
    with forced(implementation):
        check_everything(OP, *arguments(dtype=dtype, device=device))
        check_everything(OP, *arguments(dtype=dtype, device=device, projected=True), scale=scales(dtype, device)[3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_weight_may_be_fp32(device: str, implementation: str, dtype: torch.dtype) -> None:
    args = arguments(dtype=dtype, device=device, norm_dtype=torch.float32)
    with forced(implementation):
        check_numerics(call(OP, *args), naive(*args), oracle(*args), atol=1e-6)
        check_everything(OP, *args, scale=torch.ones(1, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp32_scale_keeps_its_digits(device: str, implementation: str, dtype: torch.dtype) -> None:
    x, weight, norm, eps, residual = arguments(dtype=dtype, device=device)
    scale = torch.tensor(1 / 3, device=device)
    expected = (residual.float() * scale).to(dtype)  # the norm of a zero row is zero
    assert dtype == torch.float32 or not torch.equal(expected, (residual.float() * scale.to(dtype)).to(dtype))
    with forced(implementation):
        assert_same_bits(call(OP, x * 0, weight, norm, eps, residual, scale=scale), expected)
        assert_same_bits(call(OP, residual * 0, None, norm, eps, residual, scale=scale), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_between_is_rounded(device: str, implementation: str, dtype: torch.dtype) -> None:
    # The projection is 1 + 2^-12 of its partner in every row, so a rounded projection or norm makes the sum zero.
    x = torch.tensor([[1.0, 2.0**-12]], dtype=dtype, device=device)
    weight = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype, device=device)
    residual = torch.tensor([[-1.0, -1.0]], dtype=dtype, device=device)
    args = (x, weight, torch.ones(2, dtype=dtype, device=device), 0.0, residual)
    with forced(implementation):
        got = call(OP, *args)
    exact = reference(*map(to64, args))
    assert exact.abs().min() > 2.0**-13
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=2.0**-22)  # 1 ulp, and fp32's error near 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offsets_beyond_int32(device: str, implementation: str, dtype: torch.dtype) -> None:
    args = arguments(out=3, dtype=dtype, device=device)
    buffer = torch.empty(2**31 + 64, dtype=dtype, device=device)  # mostly never touched
    for place in (0, 1, 4):
        far = buffer.as_strided(args[place].shape, (2**30, 1)).copy_(args[place])
        with forced(implementation):
            assert_same_bits(call(OP, *args[:place], far, *args[place + 1 :]), call(OP, *args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    priority=st.permutations(range(3)),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    broadcast=st.booleans(),
    projected=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(leading=[2, 3], priority=[1, 0, 2], gaps=(1, 0), broadcast=False, projected=True, seed=1)
def test_any_leading_shape_and_strides(device: str, implementation: str, leading: list[int], priority: list[int],
                                       gaps: tuple[int, int], broadcast: bool, projected: bool, seed: int,
                                       dtype: torch.dtype) -> None:
    x, weight, norm, eps, residual = arguments(tuple(leading), dtype=dtype, device=device, projected=projected,
                                               seed=seed)
    far = restrided(x, priority, gaps[0])
    if broadcast and x.numel():
        far = far[(slice(0, 1),) * len(leading)].expand(x.shape)
    far_weight = None if weight is None else restrided(weight, priority, gaps[1])
    scale = scales(dtype, device)[seed % 5]
    with forced(implementation):
        got = call(OP, far, far_weight, norm, eps, restrided(residual, priority[::-1], gaps[1]), scale=scale)
    assert got.is_contiguous()
    plain = (far.contiguous(), weight, norm, eps, residual)
    check_numerics(got, naive(*plain, scale=scale), oracle(*plain, scale=scale), atol=1e-6)


@pytest.mark.kernels_only
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_does_not_depend_on_the_batch(device: str, implementation: str, dtype: torch.dtype) -> None:
    sizes = ((200, 72), (1024, 256), (2048, 256), (4096, 1024), (1000, 768))
    for inner, out in sizes if device == "cuda" else sizes[:1]:
        args = arguments((150,), inner, out, dtype, device)
        check_rows_alone(OP, implementation, args, (0, 4))


@pytest.mark.parametrize("implementation", ["cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cpu_bits_depend_on_neither_threads_nor_batch(implementation: str, dtype: torch.dtype) -> None:
    for inner, out in ((264, 1000), (256, 90), (21, 333)):  # whole and broken vectors, and groups of weight rows
        x, weight, norm, eps, residual = arguments((150,), inner, out, dtype)
        projected = random_tensor(150, out, seed=9, dtype=dtype)
        for args in ((x, weight, norm, eps, residual), (projected, None, norm, eps, residual)):
            check_threads(OP, implementation, args)
            check_rows_alone(OP, implementation, args, (0, 4))


def test_compiled_equals_eager() -> None:
    check_compiled(OP, *arguments((2, 3), dtype=torch.bfloat16))
    check_compiled(OP, *arguments((2, 3), dtype=torch.bfloat16, projected=True), scale=torch.tensor(0.7))


def test_errors() -> None:
    x, weight, norm, eps, residual = arguments()
    why = "(x is [3, 48], weight has 40 rows)"
    check_error(OP, "linear_norm_add: x: expected at least 1 dimensions, got 0 ([])", x.new_empty(()), weight, norm,
                eps, residual)
    check_error(OP, "linear_norm_add: x: expected bfloat16 or float16 or float32, got int64", x.long(), weight, norm,
                eps, residual)
    check_error(OP, "linear_norm_add: weight: expected [*, 48], got [40, 47] (x has 48 columns)", x, weight[:, :47],
                norm, eps, residual)
    check_error(OP, "linear_norm_add: weight: expected float32, got float16 (x is float32)", x, weight.half(), norm,
                eps, residual)
    check_error(OP, f"linear_norm_add: norm_weight: expected [40], got [39] {why}", x, weight, norm[:39], eps, residual)
    check_error(OP, "linear_norm_add: norm_weight: expected float32, got bfloat16 (x is float32)", x, weight,
                norm.bfloat16(), eps, residual)
    check_error(OP, f"linear_norm_add: residual: expected [3, 40], got [2, 40] {why}", x, weight, norm, eps,
                residual[:2])
    check_error(OP, f"linear_norm_add: residual: expected [3, 40], got [1, 3, 40] {why}", x, weight, norm, eps,
                residual[None])
    check_error(OP, f"linear_norm_add: residual: expected [3, 40], got [3, 39] {why}", x, weight, norm, eps,
                residual[:, :39])
    check_error(OP, "linear_norm_add: residual: expected float32, got float16 (x is float32)", x, weight, norm, eps,
                residual.half())
    check_error(OP, "linear_norm_add: scale: expected 1 element, got 2 ([2])", x, weight, norm, eps, residual,
                scale=norm[:2])
    check_error(OP, "linear_norm_add: scale: expected 1 element, got 0 ([0, 1])", x, weight, norm, eps, residual,
                scale=residual[:0, :1])
    check_error(OP, "linear_norm_add: scale: expected float32, got float16 (x is float32)", x, weight, norm, eps,
                residual, scale=norm[:1].half())
    half = [v.half() if isinstance(v, Tensor) else v for v in (x, weight, norm, eps, residual)]
    check_error(OP, "linear_norm_add: scale: expected float16 or float32, got bfloat16 (x is float16)", *half,
                scale=norm[:1].bfloat16())


def test_errors_without_weight() -> None:
    x, _, norm, eps, residual = arguments(projected=True)
    why = "(x is [3, 40], already projected)"
    check_error(OP, f"linear_norm_add: norm_weight: expected [40], got [39] {why}", x, None, norm[:39], eps, residual)
    check_error(OP, f"linear_norm_add: residual: expected [3, 40], got [3, 39] {why}", x, None, norm, eps,
                residual[:, :39])


def test_stride_and_device_errors() -> None:
    x, weight, norm, eps, residual = arguments()
    check_error(OP, "linear_norm_add: x: expected a contiguous last dimension, got strides [1, 3]",
                x.t().contiguous().t(), weight, norm, eps, residual)
    check_error(OP, "linear_norm_add: weight: expected a contiguous last dimension, got strides [1, 40]", x,
                weight.t().contiguous().t(), norm, eps, residual)
    check_error(OP, "linear_norm_add: norm_weight: expected a contiguous last dimension, got strides [2]", x, weight,
                norm.repeat(2)[::2], eps, residual)
    check_error(OP, "linear_norm_add: residual: expected a contiguous last dimension, got strides [1, 3]", x, weight,
                norm, eps, residual.t().contiguous().t())
    check_device_errors(OP, x, weight, norm, eps, residual, scale=norm[:1])


def test_debug_names_the_first_offender() -> None:
    x, weight, norm, eps, residual = arguments()
    scale = torch.tensor(torch.nan)
    check_debug_error(OP, "linear_norm_add: scale: expected a finite value, got nan", x, weight, norm, eps, residual,
                      scale=scale)
    check_debug_error(OP, "linear_norm_add: scale[0]: expected a finite value, got nan", x, weight, norm, eps, residual,
                      scale=scale.reshape(1))
    for tensor, name, index in ((residual, "residual", (2, 3)), (norm, "norm_weight", (4,)), (weight, "weight", (5, 6)),
                                (x, "x", (1, 7))):
        tensor[index] = torch.inf
        message = f"linear_norm_add: {name}{list(index)}: expected a finite value, got inf"
        check_debug_error(OP, message, x, weight, norm, eps, residual)
