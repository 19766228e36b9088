"""lm_head_topk: exact ranking against plain sorting, numerics against fp64, fp8, shards, chunks, and its errors."""

from __future__ import annotations

from itertools import pairwise
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
    check_numerics,
    forced,
    implementations,
    random_tensor,
    to64,
)
from head_cases import (
    INDICES,
    LargestFp32,
    assert_ids_near,
    assert_topk,
    check_reads_nothing,
    check_rows_alone,
    check_threads,
    exact_on_cpu,
    integers,
    sort_row,
)

from mtp_kernels import merge_topk, quantize_lm_head
from mtp_kernels.reference.lm_head_topk import lm_head_topk as reference

OP = "lm_head_topk"
CHUNKS = "mtp_kernels.reference.lm_head_topk.CHUNK_ELEMENTS"


def arguments(leading: tuple[int, ...] = (3,), hidden: int = 24, rows: int = 40, k: int = 4,
              dtype: torch.dtype = torch.float32, device: str = "cpu", make: Any = random_tensor) -> tuple[Any, ...]:
    normed = make(*leading, hidden, seed=1, dtype=dtype, device=device)
    return normed, make(rows, hidden, seed=2, dtype=dtype, device=device), k


def token_map(rows: int, index: torch.dtype = torch.int64, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randperm(10 * rows, generator=generator)[:rows].to(index).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 5, 37])
@pytest.mark.parametrize("ids", ["from 0", "from 1000", "mapped int32", "mapped int64"])
def test_exact_ranking(device: str, implementation: str, dtype: torch.dtype, k: int, ids: str) -> None:
    """Inputs whose logits are exact and tie often: ids equal to those of a plain sort by (logit, token id)."""
    normed, weight, _ = arguments((2, 7), 8, 37, k, dtype, device, integers)
    named = list(range(37))
    options: dict[str, Any] = {}
    if ids == "from 1000":
        options["vocab_start"] = 1000
        named = list(range(1000, 1037))
    elif ids != "from 0":
        options["token_map"] = token_map(37, torch.int32 if ids.endswith("32") else torch.int64, device)
        named = options["token_map"].tolist()
    with forced(implementation):
        got = call(OP, normed, weight, k, **options)
    exact = (normed.double() @ weight.double().T).view(-1, 37).tolist()
    assert all(len(set(row)) < 37 for row in exact)
    assert_topk(got, [(row, named) for row in exact], k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (0,), ()])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...], cap: float
                      ) -> None:
    normed, weight, k = arguments(leading, 96, 203, 4, dtype, device)
    with forced(implementation):
        logprobs, ids, total = call(OP, normed, weight, k, logits_soft_cap=cap)
    naive, exact = normed @ weight.T, normed.double() @ weight.double().T
    if cap:
        naive, exact = cap * torch.tanh(naive / cap), cap * torch.tanh(exact / cap)
    error = 2 * (naive.double() - exact).abs().max().item() + 1e-5 if exact.numel() else 0.0
    assert_ids_near(ids, exact.topk(k).indices, exact, error)
    check_numerics(logprobs, naive.log_softmax(-1).topk(k).values, exact.log_softmax(-1).topk(k).values, atol=1e-5)
    check_numerics(total, naive.logsumexp(-1), exact.logsumexp(-1), atol=1e-5)
    oracle = reference(to64(normed), to64(weight), k, logits_soft_cap=cap)
    torch.testing.assert_close(oracle[0], exact.log_softmax(-1).topk(k).values)
    torch.testing.assert_close(oracle[2], exact.logsumexp(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [95, 96, 130])
def test_fp8_weight(device: str, implementation: str, dtype: torch.dtype, hidden: int) -> None:
    """Rows of very different scale, 0.003 among them, against the dequantised weight in fp64."""
    normed, weight, k = arguments((5,), hidden, 80, 4, dtype, device)
    quantized, _ = quantize_lm_head(weight)
    scale = (random_tensor(80, seed=6, device=device).abs() + 1) * 0.003
    with forced(implementation):
        logprobs, ids, total = call(OP, normed, quantized, k, weight_scale=scale)
    dequantized = quantized.double() * scale.double().unsqueeze(-1)
    exact = normed.double() @ dequantized.T
    best = exact.topk(k)
    naive = normed @ dequantized.to(dtype).T
    assert_ids_near(ids, best.indices, exact, 2 * (naive.double() - exact).abs().max().item() + 1e-5)
    check_numerics(total, naive.logsumexp(-1), exact.logsumexp(-1), atol=1e-5)
    check_numerics(logprobs, naive.log_softmax(-1).topk(k).values, exact.log_softmax(-1).topk(k).values, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_weight_and_any_row(device: str, implementation: str, dtype: torch.dtype) -> None:
    """Rows of 0, of NaN, with an infinity beside large numbers; others very small or large."""
    normed, weight = (integers(n, 38, seed=n, dtype=dtype, device=device) for n in (9, 70))
    quantized, scale = weight.to(torch.float8_e4m3fn), torch.full((70,), 1 / 8, device=device)
    small, large = (2.0**-24, 2.0**13) if dtype == torch.float16 else (2.0**-100, 2.0**110)
    normed[1] *= small
    normed[[2, 5]] *= large
    normed[3], normed[4, 7] = 0, torch.nan
    normed[5, 30], normed[6, 2], normed[7, 3], normed[7, 4] = torch.inf, -torch.inf, torch.inf, -torch.inf
    with forced(implementation):
        got = call(OP, normed, quantized, 12, weight_scale=scale)
    exact = (normed.double()[:, None] * quantized.double()).sum(-1) / 8
    for row in (0, 1, 3, 4, 8):
        assert_topk((got[0][row], got[1][row], got[2][row]), [(exact[row].tolist(), range(70))], 12)
    for row in (2, 5, 6, 7):
        _, ids, total = sort_row(exact[row].tolist(), range(70), 12)
        assert got[1][row].tolist() == ids and got[2][row].item() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[], [17], [1, 3], [20, 21, 22]])
@pytest.mark.parametrize("quantized", [False, True])
def test_shards_merge_to_the_whole(device: str, implementation: str, dtype: torch.dtype, cuts: list[int],
                                   quantized: bool) -> None:
    normed, weight, _ = arguments((2, 3), 32, 61, 1, dtype, device)
    weight, scale = quantize_lm_head(weight) if quantized else (weight, None)
    for k in (1, 4):
        edges = [0, *cuts, 61]
        with forced(implementation):
            whole = call(OP, normed, weight, k, weight_scale=scale)
            shards = [
                call(OP, normed, weight[a:b], min(k, b - a), weight_scale=None if scale is None else scale[a:b],
                     vocab_start=a)
                for a, b in pairwise(edges)
            ]
        padded = [_pad(shard, k) for shard in shards]
        logprobs, ids, total = merge_topk(*(torch.stack(part) for part in zip(*padded)))
        assert ids.tolist() == whole[1].tolist()
        torch.testing.assert_close(logprobs, whole[0], rtol=1e-6, atol=4e-6)
        torch.testing.assert_close(total, whole[2], rtol=1e-6, atol=1e-6)


def _pad(shard: tuple[torch.Tensor, ...], k: int) -> tuple[torch.Tensor, ...]:
    """A shard of fewer than k rows, filled up with candidates that never win."""
    logprobs, ids, total = shard
    more = (0, k - ids.size(-1))
    return (
        torch.nn.functional.pad(logprobs, more, value=-torch.inf),
        torch.nn.functional.pad(ids, more, value=2**40),
        total,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("mapped", [False, True])
def test_nan_and_infinity(device: str, implementation: str, mapped: bool) -> None:
    """A NaN logit ranks last and is not summed; a row of NaN gives its lowest ids; neighbours keep their bits."""
    normed, weight, _ = arguments((4,), device=device)
    normed = normed.abs()
    options: dict[str, Any] = {"token_map": token_map(40, device=device)} if mapped else {}
    names = options.get("token_map", torch.arange(40, device=device))
    with forced(implementation):
        clean = call(OP, normed, weight, 40, **options)
        normed[2] = torch.nan
        weight[11] = torch.nan
        logprobs, ids, total = call(OP, normed, weight, 40, **options)
        few = call(OP, normed, weight, 4, **options)
        weight[[20, 30]] = torch.inf
        certain = call(OP, normed, weight, 40, **options)
        weight[:] = -torch.inf
        nothing = call(OP, normed, weight, 4, **options)
    lowest = names.sort().values.tolist()
    for row in (0, 1, 3):
        rest = clean[1][row] != names[11]
        kept = clean[0][row][rest] + clean[2][row]
        assert ids[row].tolist() == [*clean[1][row][rest].tolist(), names[11].item()]
        torch.testing.assert_close(total[row], kept.logsumexp(-1))
        torch.testing.assert_close(logprobs[row, :39], kept - total[row])
        assert logprobs[row, 39] == -torch.inf
        assert certain[1][row, :2].tolist() == sorted(names[[20, 30]].tolist())
        assert certain[0][row].tolist() == [0.0] * 2 + [-torch.inf] * 38 and certain[2][row] == torch.inf
    assert ids[2].tolist() == lowest and few[1][2].tolist() == lowest[:4]
    assert (logprobs[2] == -torch.inf).all() and total[2] == -torch.inf
    assert nothing[1].tolist() == [lowest[:4]] * 4
    assert (nothing[0] == -torch.inf).all() and (nothing[2] == -torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 5])
def test_rows_alone(device: str, implementation: str, dtype: torch.dtype, k: int) -> None:
    check_rows_alone(OP, implementation, *arguments((37,), 64, 300, k, dtype, device, exact_on_cpu(device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "k"), [(37, 5), (70, 1), (20, 12)])
def test_fp8_rows_alone(device: str, implementation: str, dtype: torch.dtype, rows: int, k: int) -> None:
    normed, weight, _ = arguments((rows,), 134, 300, k, dtype, device, exact_on_cpu(device))
    quantized, scale = quantize_lm_head(weight)
    check_rows_alone(OP, implementation, normed, quantized, k, weight_scale=scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i == "triton"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [6, 64, 134])
def test_spread_rows(device: str, implementation: str, dtype: torch.dtype, columns: int) -> None:
    """Even columns, then odd ones, of every 32; scaled by powers of two, and what is 2^-39 of the largest is there."""
    from mtp_kernels.triton_ops._fp8_words import spread

    values = random_tensor(2, 3, 9, columns, seed=3, dtype=torch.float32)
    if dtype != torch.float16:
        values[..., 0, :] *= 2.0**-120
        values[..., 1, :] *= 2.0**110
        values[..., 2, 1:] *= torch.logspace(0, -60, columns - 1, 2.0)
    values[..., 3, :] = 0
    values[..., 4, 2], values[..., 5, 3], values[..., 5, 4] = torch.nan, torch.inf, -torch.inf
    x = values.to(dtype).to(device).transpose(0, 1)
    launch, rows, scale = spread(x)
    rows.fill_(torch.nan)
    launch.run()
    x, rows = x.reshape(-1, columns).double().cpu(), rows.double().cpu()
    order = torch.arange(rows.size(1)).view(-1, 16, 2).transpose(1, 2).flatten()
    assert (rows[:, order >= columns] == 0).all()
    back = torch.empty_like(rows)
    back[:, order] = rows
    back = back[:, :columns]
    if scale is None:
        assert dtype == torch.float16
        torch.testing.assert_close(back, x, rtol=0, atol=0, equal_nan=True)
        return
    largest = x.where(x.isfinite(), 0).abs().amax(1)
    scaled = (largest / scale.double().cpu())[largest >= 2.0**-112]
    assert ((scaled >= 2.0**14) & (scaled < 2.0**15)).all() and (scale.frexp()[0] == 0.5).all()
    error = (back * scale.double().cpu()[:, None] - x).nan_to_num(0, 0, 0).abs()
    allowed = largest[:, None] * 2.0**-39 + (x.abs().nan_to_num(0, 0, 0) * 2.0**-11 if dtype == torch.float32 else 0)
    assert (error <= allowed).all() and (back.isfinite() == x.isfinite()).all()
    assert ((back == x) | x.isfinite() | x.isnan()).all()


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_and_threads_change_no_bits(implementation: str, dtype: torch.dtype) -> None:
    """Random values, whose sums show any other order, more rows than a pass takes, and several chunks."""
    normed, weight, k = arguments((71,), 87, 2500, 5, dtype)
    quantized, scale = quantize_lm_head(weight)
    for head, options in ((weight, {"logits_soft_cap": 3.0}), (quantized, {"weight_scale": scale})):
        check_rows_alone(OP, implementation, normed, head, k, **options)
        check_threads(OP, implementation, normed, head, k, **options)


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_chunks_of_a_large_head(implementation: str, dtype: torch.dtype) -> None:
    """More rows than one task takes, with a map: the reference's ids, NaN and a row of -inf among them."""
    normed, weight, k = arguments((3,), 8, 3001, 9, dtype, make=integers)
    weight[[0, 1500, 3000]], normed[1] = torch.nan, torch.nan
    options = {"token_map": token_map(3001), "logits_soft_cap": 30.0}
    with forced(implementation):
        got = call(OP, normed, weight, k, **options)
    expected = reference(normed, weight, k, **options)
    assert got[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(got[2], expected[2], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 16, 39])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, rows_at_a_time: int) -> None:
    """Exact inputs: the same ids for any chunk, and logprobs to fp32 rounding, k above the chunk included."""
    normed, weight, _ = arguments((6,), 8, 40, make=integers)
    weight[7] = torch.nan
    for k in (1, 5, 40):
        for options in ({}, {"token_map": token_map(40)}):
            whole = reference(normed, weight, k, **options)
            with monkeypatch.context() as patch:
                patch.setattr(CHUNKS, rows_at_a_time * 8)
                logprobs, ids, total = reference(normed, weight, k, **options)
            assert ids.tolist() == whole[1].tolist()
            torch.testing.assert_close(logprobs, whole[0], rtol=1e-6, atol=2e-6)
            torch.testing.assert_close(total, whole[2], rtol=1e-6, atol=1e-6)


def test_a_chunk_is_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHUNKS, 64 * 16)
    args = arguments((2,), 64, 1000, 3, torch.bfloat16)
    with LargestFp32() as largest:
        reference(*args)
    assert largest.numel == 64 * 16  # the head has 64000 elements, and its logits 2000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_contract(device: str, dtype: torch.dtype) -> None:
    args = arguments(dtype=dtype, device=device)
    check_everything(OP, *args, vocab_start=7, logits_soft_cap=3.0)
    check_reads_nothing(OP, *args, vocab_start=7, logits_soft_cap=3.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", INDICES)
def test_contract_of_fp8_and_map(device: str, index: torch.dtype) -> None:
    normed, weight, k = arguments(dtype=torch.bfloat16, device=device)
    weight, scale = quantize_lm_head(weight)
    mapped = token_map(40, index, device)
    check_everything(OP, normed, weight, k, weight_scale=scale, token_map=mapped)
    check_reads_nothing(OP, normed, weight, k, weight_scale=scale, token_map=mapped)


@pytest.mark.parametrize("leading", [(0,), (), (2, 2)])
def test_contract_of_other_ranks(leading: tuple[int, ...]) -> None:
    check_everything(OP, *arguments(leading))


def test_compiled_and_devices() -> None:
    normed, weight, k = arguments()
    quantized, scale = quantize_lm_head(weight)
    check_compiled(OP, normed, weight, k, vocab_start=5)
    check_compiled(OP, normed, quantized, k, weight_scale=scale, token_map=token_map(40))
    check_device_errors(OP, normed, quantized, k, weight_scale=scale, token_map=token_map(40))


def test_gradient() -> None:
    normed, weight, k = map(to64, arguments((2,), 6))
    normed.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: reference(x, w, k, logits_soft_cap=9.0)[::2], (normed, weight), fast_mode=True
    )


def test_a_slice_of_rows_is_a_shard() -> None:
    normed, weight, k = arguments()
    one = call(OP, normed, weight[8:29], k, vocab_start=8)
    two = call(OP, normed, weight[8:29].clone(), k, vocab_start=8)
    for a, b in zip(one, two):
        assert_same_bits(a, b)


def test_errors() -> None:
    normed, weight, k = arguments()
    quantized, scale = quantize_lm_head(weight)
    mapped = token_map(40)

    def error(message: str, x: Any = normed, w: Any = weight, n: int = k, **options: Any) -> None:
        check_error(OP, f"lm_head_topk: {message}", x, w, n, **options)

    error("normed: expected at least 1 dimensions, got 0 ([])", x=normed.new_empty(()))
    error("normed: expected bfloat16 or float16 or float32, got float64", x=normed.double())
    error("weight: expected [*, 24], got [40, 23] (normed has 24 columns)", w=weight[:, :23])
    error("weight: expected float32 or float8_e4m3fn, got float16 (normed is float32)", w=weight.half())
    error("weight: expected a contiguous last dimension, got strides [1, 40]", w=torch.empty(24, 40).t())
    error("weight_scale: expected [40] float32, got None (weight is float8_e4m3fn)", w=quantized)
    error("weight_scale: expected [40], got [39] (weight has 40 rows)", w=quantized, weight_scale=scale[:39])
    error("weight_scale: expected float32, got float16", w=quantized, weight_scale=scale.half())
    error("weight_scale: expected None, got [40] (weight is float32)", weight_scale=scale)
    error("k: expected 1 to 40, got 41 (weight has 40 rows)", n=41)
    error("k: expected 1 to 40, got 0 (weight has 40 rows)", n=0)
    error("token_map: expected [40], got [39] (weight has 40 rows)", token_map=mapped[:39])
    error("token_map: expected int32 or int64, got float32", token_map=mapped.float())
    error("vocab_start: expected 0, got 5 (token_map names the ids)", token_map=mapped, vocab_start=5)
    error("vocab_start: expected at least 0, got -1", vocab_start=-1)
    error("logits_soft_cap: expected 0 or a positive number, got -1.0", logits_soft_cap=-1.0)
    error("logits_soft_cap: expected 0 or a positive number, got inf", logits_soft_cap=torch.inf)
    error("logits_soft_cap: expected 0 or a positive number, got nan", logits_soft_cap=torch.nan)


def test_debug_names_the_first_offender() -> None:
    normed, weight, k = arguments()
    quantized, scale = quantize_lm_head(weight)
    scale[3] = torch.nan
    check_debug_error(OP, "lm_head_topk: weight_scale[3]: expected a finite value, got nan", normed, quantized, k,
                      weight_scale=scale)
    mapped = token_map(40)
    mapped[9] = -2
    check_debug_error(OP, "lm_head_topk: token_map[9]: expected a token id of at least 0, got -2", normed, weight, k,
                      token_map=mapped)
    weight[4, 5] = -torch.inf
    check_debug_error(OP, "lm_head_topk: weight[4, 5]: expected a finite value, got -inf", normed, weight, k)
