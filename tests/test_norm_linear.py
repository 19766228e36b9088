"""norm_linear against fp64, and its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemm_cases import check_rows_alone, check_threads
from harness import (
    DEVICES,
    FLOATS,
    call,
    check_debug_error,
    check_error,
    check_everything,
    check_numerics,
    forced,
    implementations,
    random_tensor,
    restrided,
    to64,
)
from torch import Tensor

from mtp_kernels.reference.norm_linear import norm_linear as reference

OP = "norm_linear"


def arguments(leading: tuple[int, ...] = (3,), inner: int = 48, out: int = 40, dtype: torch.dtype = torch.float32,
              device: str = "cpu", norm_dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    x = random_tensor(*leading, inner, seed=1, dtype=dtype, device=device)
    norm = random_tensor(inner, seed=2, dtype=norm_dtype or dtype, device=device)
    weight = random_tensor(out, inner, seed=3, dtype=dtype, device=device, scale=inner**-0.5)
    return x, norm, 1e-6, weight


def formula(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """The op in PyTorch's own functions, in the dtype of its arguments."""
    return F.linear(F.rms_norm(x, (x.size(-1),), norm, eps), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (0,), ()])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    args = arguments(leading, 200, 72, dtype, device)
    with forced(implementation):
        got = call(OP, *args)
    naive = formula(*args)
    exact = reference(*map(to64, args))
    torch.testing.assert_close(exact, formula(*map(to64, args)), rtol=1e-12, atol=1e-12)
    check_numerics(got, naive, exact, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("leading", [(1,), (20,), (2, 35)])  # 16 rows share weights, 32, 64
def test_a_wide_product(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    for inner, out in ((520, 136), (640, 72)):  # a broken and a whole last block of K
        args = arguments(leading, inner, out, dtype, device)
        far = (restrided(args[0], [1, 0], 8), *args[1:3], restrided(args[3], [0], 8))
        with forced(implementation):
            got = call(OP, *far)
        check_numerics(got, formula(*args), reference(*map(to64, args)), atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 9])
def test_an_infinite_weight(device: str, implementation: str, dtype: torch.dtype, rows: int) -> None:
    """Products with it are infinite, of their sign; only 0 * inf and inf - inf are NaN. Other columns do not change."""
    x, norm, _, weight = arguments((rows,), 96, 40, dtype, device)
    x[0] = 1.0  # with eps 0 its norm is the norm's weight: values of 16 bits, exactly
    x[0, 5] = -1.0
    x[-1, 7] = 0.0
    weight[3, 5], weight[4, 95], weight[6, 7] = torch.inf, -torch.inf, torch.inf
    weight[8, 0], weight[8, 1] = torch.inf, -torch.inf
    with forced(implementation):
        got = call(OP, x, norm, 0.0, weight)
    exact = reference(*map(to64, (x, norm, 0.0, weight)))
    assert exact[0, 3].isinf() and exact[0, 4].isinf() and exact[-1, 6].isnan() and exact.isfinite().any()
    special = ~exact.isfinite()
    torch.testing.assert_close(got.double()[special], exact[special], rtol=0, atol=0, equal_nan=True)
    assert got.isfinite().equal(~special)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_contract(device: str, implementation: str, dtype: torch.dtype) -> None:
    with forced(implementation):
        check_everything(OP, *arguments(dtype=dtype, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_scale_may_come_last(device: str, implementation: str, rows: int) -> None:
    # As in bf16, which the interpreter cannot do, so in fp16, at sizes that do not overflow.
    from mtp_kernels.triton_ops.norm_linear import plan

    args = arguments((rows,), 520, 72, torch.float16, device)
    [launch], got = plan(*args)
    assert not launch.constants["SCALE_LAST"]
    replace(launch, constants={**launch.constants, "SCALE_LAST": True}).run()
    check_numerics(got, formula(*args), reference(*map(to64, args)), atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_weight_may_be_fp32(device: str, implementation: str, dtype: torch.dtype) -> None:
    with forced(implementation):
        check_everything(OP, *arguments(dtype=dtype, device=device, norm_dtype=torch.float32))


@pytest.mark.kernels_only
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_does_not_depend_on_the_batch(device: str, implementation: str, dtype: torch.dtype) -> None:
    sizes = ((72, 40), (256, 2048), (256, 1000), (768, 200), (1000, 6000), (1024, 8192), (1024, 16384))
    for inner, out in sizes if device == "cuda" else sizes[:1]:
        args = arguments((150,), inner, out, dtype, device)
        check_rows_alone(OP, implementation, args, (0,))


@pytest.mark.parametrize("implementation", ["cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cpu_bits_depend_on_neither_threads_nor_batch(implementation: str, dtype: torch.dtype) -> None:
    for inner, out in ((264, 1000), (256, 90), (21, 333)):  # whole and broken vectors, and groups of weight rows
        args = arguments((150,), inner, out, dtype)
        check_threads(OP, implementation, args)
        check_rows_alone(OP, implementation, args, (0,))


def test_errors() -> None:
    x, norm, eps, weight = arguments()
    check_error(OP, "norm_linear: norm_weight: expected [48], got [47] (x has 48 columns)", x, norm[:47], eps, weight)
    check_error(OP, "norm_linear: weight: expected [*, 48], got [40, 47] (x has 48 columns)", x, norm, eps,
                weight[:, :47])
    check_error(OP, "norm_linear: weight: expected float32, got float16 (x is float32)", x, norm, eps, weight.half())
    check_error(OP, "norm_linear: x: expected bfloat16 or float16 or float32, got float64", x.double(), norm, eps,
                weight)
    check_error(OP, "norm_linear: norm_weight: expected float32, got bfloat16 (x is float32)", x, norm.bfloat16(), eps,
                weight)
    check_error(OP, "norm_linear: weight: expected a contiguous last dimension, got strides [1, 40]", x, norm, eps,
                torch.empty(48, 40).t())
    check_error(OP, "norm_linear: x: expected at least 1 dimensions, got 0 ([])", x.new_empty(()), norm, eps, weight)


def test_debug_names_the_first_offender() -> None:
    x, norm, eps, weight = arguments()
    x[1, 7] = torch.inf
    check_debug_error(OP, "norm_linear: x[1, 7]: expected a finite value, got inf", x, norm, eps, weight)
