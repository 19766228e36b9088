"""draft_attention against an independent loop over keys in fp64: heads, scales, norm, RoPE, soft cap."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    FP8,
    HEAD_DIM,
    LAYOUTS,
    OP,
    check_call,
    each_implementation,
    everywhere,
    inv_freq,
    move,
    naive,
    options,
    problem,
    turn,
)
from harness import (
    FLOATS,
    call,
    check_everything,
    check_numerics,
    forced,
    random_tensor,
    to64,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels.reference.draft_attention import draft_attention as reference


@everywhere
@each_implementation
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize("lengths", [[1], [13, 0, 7, 22], [0, 0], []])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, window_left: int, lengths: list[int]
                      ) -> None:
    extra = options(len(lengths), 2, device=device)
    for more in ({}, extra):
        check_call(*problem(lengths, dtype=dtype, window_left=window_left, device=device, **more), implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (16, 1)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(device: str, implementation: str, heads: tuple[int, int], rows: int, head_dim: int) -> None:
    check_call(*problem([9, 4], rows=rows, heads=heads, head_dim=head_dim, device=device), implementation)


@pytest.mark.parametrize("head_dim", [2, 6, 50])
def test_reference_takes_any_even_head_dim(head_dim: int) -> None:
    check_call(*problem([9, 4], head_dim=head_dim, **options(2, 2, head_dim)))


def test_reference_computes_in_fp64_for_fp64() -> None:
    args, kwargs = problem([13, 0, 7], window_left=8, flat=True, **options(3, 2))
    got = reference(*map(to64, args), **{name: to64(value) for name, value in kwargs.items()})
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, naive(torch.float64, *args, **kwargs), rtol=0, atol=1e-13)


@everywhere
@each_implementation
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 2, 5, 16]),
    window_left=st.integers(-1, 45),
    flat=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)
def test_any_table(device: str, implementation: str, lengths: list[int], page_size: int, window_left: int, flat: bool,
                   layout: str, seed: int) -> None:
    check_call(*problem(lengths, page_size=page_size, window_left=window_left, flat=flat, layout=layout, seed=seed,
                        rows=1, heads=(2, 1), device=device), implementation)


@everywhere
@pytest.mark.parametrize("case", ["table", "flat", "fp8"])
def test_contract(device: str, case: str) -> None:
    lengths = [7, 0, 12]
    extra = options(3, 2, 16, device)
    if case == "fp8":
        scale = torch.tensor([0.5, 0.25], device=device)
        extra |= {"kv_dtype": FP8, "k_scale": scale, "v_scale": scale[0]}
    args, kwargs = problem(lengths, head_dim=16, window_left=8, flat=case == "flat", poison=0.0, device=device, **extra)
    args[3].clamp_(0, 1)  # these checks also run with MTP_DEBUG=1
    check_everything(OP, *args, **kwargs)


@everywhere
@each_implementation
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_equals_the_dequantised_cache(device: str, implementation: str, shape: tuple[int, ...], dtype: torch.dtype
                                          ) -> None:
    """Calibrated scales are far from 1: K and V of order 1 kept as fp8 of order 100."""
    k_scale, v_scale = (torch.full(shape, s, device=device) for s in (0.003, 0.004))
    if shape == (2,):
        k_scale[1], v_scale[1] = 0.009, 0.001
    args, kwargs = problem([13, 0, 7], kv_dtype=FP8, dtype=dtype, window_left=9, device=device)
    q, k, v, *rest = args
    k, v = ((t.float() * 100).to(FP8) for t in (k, v))
    got = check_call((q, k, v, *rest), {**kwargs, "k_scale": k_scale, "v_scale": v_scale}, implementation)
    dequantised = [(t.double() * s.double().view(-1, 1)) for t, s in ((k, k_scale), (v, v_scale))]
    exact = naive(torch.float64, q, *dequantised, *rest, **kwargs)
    check_numerics(got, exact.to(dtype), exact, atol=1e-6)
    one = torch.ones_like(k_scale)
    with forced(implementation):  # the fault this guards against is silent: scales of 1 give other, finite results
        wrong = call(OP, q, k, v, *rest, **kwargs, k_scale=one, v_scale=v_scale)
    assert torch.isfinite(wrong).all() and (wrong - got).abs().max() > 0.05


@everywhere
@each_implementation
def test_scales_apply_to_any_cache(device: str, implementation: str) -> None:
    for scales in ({"k_scale": torch.tensor(0.5, device=device)}, {"v_scale": torch.tensor([2.0, 3.0], device=device)}):
        check_call(*problem([13, 7], device=device, **scales), implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norm_in_fp32", [False, True])
def test_q_norm(device: str, implementation: str, dtype: torch.dtype, norm_in_fp32: bool) -> None:
    weight = random_tensor(HEAD_DIM, seed=5, dtype=torch.float32 if norm_in_fp32 else dtype, device=device)
    for eps in (1e-6, 0.5):
        check_call(*problem([13, 7], dtype=dtype, device=device, q_norm_weight=weight, q_norm_eps=eps),
                   implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("cap", [0.3, 5.0])
def test_soft_cap(device: str, implementation: str, cap: float) -> None:
    args, kwargs = problem([13, 7], window_left=9, device=device)
    args = (args[0] * 5, *args[1:])
    got = check_call(args, {**kwargs, "logits_soft_cap": cap}, implementation)
    with forced(implementation):
        assert (got - call(OP, *args, **kwargs)).abs().max() > 0.1


@everywhere
@each_implementation
@pytest.mark.parametrize("pairs", [0, 1, 8, 32])
@pytest.mark.parametrize("each_row", [False, True])
def test_rope(device: str, implementation: str, pairs: int, each_row: bool) -> None:
    positions = torch.tensor([[0, 1, 2], [700, 40000, 262143]], device=device)
    check_call(*problem([13, 7], rows=3, device=device, rope_inv_freq=inv_freq(pairs).to(device),
                        positions=positions if each_row else positions[:, 1].contiguous()), implementation)


@everywhere
@each_implementation
@pytest.mark.parametrize("position", [262143, 999983, 2**24 - 1])
def test_rope_far_out(device: str, implementation: str, position: int) -> None:
    """Full fp32 sine at large angles: frequencies are powers of two, so the fp32 angle is exact and fp64 may judge.

    A sine kept in bf16 or fp16, or of an angle reduced in bf16, is shown to fail the same bound.
    """
    freqs = (2.0 ** -torch.arange(32)).to(device)
    args, kwargs = problem([9], rows=1, device=device)
    args = (args[0] * 4, *args[1:])  # sharp scores, so that an error in the angle shows
    kwargs |= {"rope_inv_freq": freqs, "positions": torch.tensor([position], device=device)}
    angle = torch.tensor(position, dtype=torch.float64) * freqs.cpu().double()
    assert torch.equal(angle.float().double(), angle)
    check_call(args, kwargs, implementation)
    plain = {"window_left": -1}
    exact = naive(torch.float64, *args, **kwargs)
    for sine_dtype in (torch.bfloat16, torch.float16):
        turned = turn(args[0].double(), kwargs["positions"], freqs, sine_dtype)
        low = naive(torch.float64, turned, *args[1:], **plain).float()
        with pytest.raises(AssertionError, match="error"):
            check_numerics(low, naive(torch.float32, *args, **kwargs), exact, atol=1e-6)


@everywhere
@each_implementation
def test_rope_angle_is_the_rounded_product(device: str, implementation: str) -> None:
    """Real frequencies: against the unrounded angle the result is off by what rounding the product explains, no more.

    One pair turns, and of two keys one is a quarter turn ahead of the unrounded angle, the other opposite to it: the
    result is sigmoid(2 * sin(error of the angle)), about 1/2 + error / 2.
    """
    freqs, position = inv_freq(32), torch.tensor([262143])
    unrounded, rounded = position.double() * freqs.double(), (position.float() * freqs).double()
    i = int((rounded - unrounded).abs().argmax())
    q, key = torch.zeros(1, 1, 1, HEAD_DIM), torch.zeros(HEAD_DIM)
    q[..., i] = 1
    key[i], key[i + 32] = -unrounded[i].sin(), unrounded[i].cos()
    k = torch.stack([key, -key]).view(1, 2, 1, HEAD_DIM)
    v = torch.stack([torch.ones(HEAD_DIM), torch.zeros(HEAD_DIM)]).view(1, 2, 1, HEAD_DIM)
    args = (q, k, v, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]), 1.0)
    with forced(implementation):
        got = call(OP, *move(args, device), rope_inv_freq=freqs.to(device), positions=position.to(device))
    error = float(rounded[i] - unrounded[i])
    assert 2**-9 < abs(error) < 2**-7  # the definition has to say which angle is meant
    assert abs(got[0, 0, 0, 0].item() - torch.tensor(2 * error).sin().sigmoid().item()) < 1e-6


@everywhere
@each_implementation
def test_rope_pairs_are_half_a_head_apart(device: str, implementation: str) -> None:
    """A quarter turn of pair 0 moves q[0] to q[head_dim / 2]: seen by a key that has only that coordinate."""
    q = torch.zeros(1, 1, 1, HEAD_DIM, device=device)
    q[..., 0] = 1
    k = torch.zeros(1, 2, 1, HEAD_DIM, device=device)
    k[0, 0, 0, HEAD_DIM // 2] = 100
    v = torch.zeros_like(k)
    v[0, 0] = 1
    quarter = torch.tensor([torch.pi / 2], device=device)
    with forced(implementation):
        got = call(OP, q, k, v, torch.zeros(1, 1, dtype=torch.int64, device=device),
                   torch.tensor([2], device=device), 1.0, rope_inv_freq=quarter,
                   positions=torch.tensor([1], device=device))
    torch.testing.assert_close(got, torch.ones_like(got))
