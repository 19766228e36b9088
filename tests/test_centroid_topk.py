"""centroid_topk: exact ranking against plain sorting, numerics against fp64, bad values, and its errors."""

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
)

from mtp_kernels import reorder_lm_head
from mtp_kernels.reference.centroid_logits import centroid_logits as reference_logits
from mtp_kernels.reference.centroid_topk import centroid_topk as reference

OP = "centroid_topk"
ACTIVE, K = 3, 4


def arguments(leading: tuple[int, ...] = (3,), hidden: int = 24, num_centroids: int = 7, size: int = 5,
              active: int = ACTIVE, k: int = K, dtype: torch.dtype = torch.float32, device: str = "cpu",
              index: torch.dtype = torch.int64, make: Any = random_tensor) -> tuple[Any, ...]:
    vocab = num_centroids * size
    normed = make(*leading, hidden, seed=1, dtype=dtype, device=device)
    centroids = make(num_centroids, hidden, seed=2, dtype=dtype, device=device)
    ordering = torch.randperm(vocab, generator=torch.Generator().manual_seed(3)).to(index).to(device)
    head = make(vocab, hidden, seed=4, dtype=dtype, device=device)
    return normed, centroids, ordering, head, active, k


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("k", [1, 4, 24])
def test_exact_ranking(device: str, implementation: str, dtype: torch.dtype, ordered: bool, k: int) -> None:
    """Inputs whose logits are exact and tie often: ids equal to those of a plain sort by (logit, token id)."""
    args = arguments((3, 8), 8, 10, 4, 6, dtype=dtype, device=device, make=integers)
    normed, centroids, ordering, head, active, _ = args
    with forced(implementation):
        got = call(OP, normed, centroids, ordering, reorder_lm_head(head, ordering) if ordered else head, active, k,
                   centroid_ordered=ordered)
    rows = []
    groups = ordering.view(10, 4).tolist()
    for x in normed.double().view(-1, 8):
        scores, exact = (centroids.double() @ x).tolist(), (head.double() @ x).tolist()
        best = sorted(range(10), key=lambda c: (-scores[c], c))[:active]
        tokens = [token for c in best for token in groups[c]]
        rows.append(([exact[t] for t in tokens], tokens))
    assert any(len(set(logits)) < len(logits) for logits, _ in rows)
    assert_topk(got, rows, k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (0,), ()])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    args = arguments(leading, 96, 12, 9, dtype=dtype, device=device)
    with forced(implementation):
        logprobs, ids, total = call(OP, *args)
    exact, candidates = reference_logits(*map(to64, args[:5]))
    naive = (args[0] @ args[3].T).gather(-1, candidates)
    error = 2 * (naive.double() - exact).abs().max().item() + 1e-5 if exact.numel() else 0.0
    full = exact.new_full((*leading, 108), -torch.inf).scatter(-1, candidates, exact)
    assert_ids_near(ids, full.topk(K).indices, full, error)
    check_numerics(logprobs, naive.log_softmax(-1).topk(K).values, full.log_softmax(-1).topk(K).values, atol=1e-5)
    check_numerics(total, naive.logsumexp(-1), full.logsumexp(-1), atol=1e-5)
    oracle = reference(*map(to64, args))
    torch.testing.assert_close(oracle[0], full.log_softmax(-1).topk(K).values)
    torch.testing.assert_close(oracle[2], full.logsumexp(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_ranks_the_values_of_centroid_logits(device: str, implementation: str, dtype: torch.dtype) -> None:
    args = arguments((16,), dtype=dtype, device=device)
    with forced(implementation):
        logprobs, ids, total = call(OP, *args)
        logits, tokens = call("centroid_logits", *args[:5])
    full = logits.new_full((16, 35), -torch.inf).scatter(-1, tokens, logits)
    assert_same_bits(logprobs, (full.gather(-1, ids) - total.unsqueeze(-1)).clamp(max=0))
    assert_same_bits(full.gather(-1, ids), logits.topk(K).values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_centroid_ordered_has_the_same_bits(device: str, implementation: str, dtype: torch.dtype) -> None:
    normed, centroids, ordering, head, active, k = arguments((9,), 64, 16, 8, dtype=dtype, device=device)
    with forced(implementation):
        one = call(OP, normed, centroids, ordering, head, active, k)
        two = call(OP, normed, centroids, ordering, reorder_lm_head(head, ordering), active, k, centroid_ordered=True)
    for a, b in zip(one, two):
        assert_same_bits(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_nan_and_infinity(device: str, implementation: str) -> None:
    """A NaN logit ranks last and is not summed; a row of NaN gives its lowest ids; neighbours keep their bits."""
    normed, centroids, ordering, head, _, _ = arguments((4,), device=device)
    normed = normed.abs()
    with forced(implementation):
        clean = call(OP, normed, centroids, ordering, head, 7, 35)
        normed[2] = torch.nan
        head[11] = torch.nan
        logprobs, ids, total = call(OP, normed, centroids, ordering, head, 7, 35)
        few = call(OP, normed, centroids, ordering, head, ACTIVE, K)
        head[[20, 30]] = torch.inf
        certain = call(OP, normed, centroids, ordering, head, 7, 35)
    for row in (0, 1, 3):
        rest = clean[1][row] != 11
        kept = clean[0][row][rest] + clean[2][row]
        assert ids[row].tolist() == [*clean[1][row][rest].tolist(), 11]
        torch.testing.assert_close(total[row], kept.logsumexp(-1))
        torch.testing.assert_close(logprobs[row, :34], kept - total[row])
        assert logprobs[row, 34] == -torch.inf
        assert certain[1][row, :2].tolist() == [20, 30] and certain[1][row, -1] == 11
        assert certain[0][row].tolist() == [0.0] * 2 + [-torch.inf] * 33 and certain[2][row] == torch.inf
    assert ids[2].tolist() == list(range(35))
    assert few[1][2].tolist() == ordering[: 5 * ACTIVE].sort().values[:K].tolist()
    assert (logprobs[2] == -torch.inf).all() and total[2] == -torch.inf
    assert (few[0][2] == -torch.inf).all() and few[2][2] == -torch.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 5])
def test_rows_alone(device: str, implementation: str, dtype: torch.dtype, k: int) -> None:
    args = arguments((18,), 64, 20, 9, ACTIVE, k, dtype, device, make=exact_on_cpu(device))
    check_rows_alone(OP, implementation, *args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("ordered", [False, True])
def test_many_and_large_centroids(device: str, implementation: str, ordered: bool) -> None:
    """More centroids, and more tokens in each, than one program of a kernel takes; equal ones among them."""
    normed, centroids, ordering, head, active, k = arguments((3,), 8, 70, 67, 18, 6, device=device, make=integers)
    if ordered:
        head = reorder_lm_head(head, ordering)
    with forced(implementation):
        got = call(OP, normed, centroids, ordering, head, active, k, centroid_ordered=ordered)
    expected = reference(normed, centroids, ordering, head, active, k, centroid_ordered=ordered)
    assert got[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[2], expected[2], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_rows_are_normalised_alone(device: str, implementation: str) -> None:
    normed, *rest = arguments((4,), device=device)
    with forced(implementation):
        before = call(OP, normed, *rest)
        normed[[0, 1, 3]] *= 100
        after = call(OP, normed, *rest)
    for a, b in zip(before, after):
        assert_same_bits(a[2], b[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("ordered", [False, True])
def test_wild_ordering_is_clamped(device: str, implementation: str, index: torch.dtype, ordered: bool) -> None:
    normed, centroids, ordering, head, _, _ = arguments(device=device, index=index)
    wild = [-1, 35, torch.iinfo(index).min, torch.iinfo(index).max] + [2**40] * (index == torch.int64)
    ordering[: len(wild)] = torch.tensor(wild, device=device)
    with forced(implementation):
        got = call(OP, normed, centroids, ordering, head, 7, 35, centroid_ordered=ordered)
        expected = call(OP, normed, centroids, ordering.clamp(0, 34), head, 7, 35, centroid_ordered=ordered)
    for a, b in zip(got, expected):
        assert_same_bits(a, b)


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_and_threads_change_no_bits(implementation: str, dtype: torch.dtype) -> None:
    """Random values, whose sums show any other order, and sizes that no vector divides."""
    args = arguments((71,), 87, 150, 7, 40, 5, dtype)
    check_rows_alone(OP, implementation, *args)
    check_threads(OP, implementation, *args)


def test_only_chosen_rows_are_converted() -> None:
    args = arguments((2,), 64, 128, 8, dtype=torch.bfloat16)
    with LargestFp32() as largest:
        reference(*args)
    assert largest.numel == 128 * 64  # the centroids; the head is 8 times as large


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", INDICES)
def test_contract(device: str, dtype: torch.dtype, index: torch.dtype) -> None:
    check_everything(OP, *arguments(dtype=dtype, device=device, index=index), centroid_ordered=dtype == torch.float16)
    check_reads_nothing(OP, *arguments(dtype=dtype, device=device, index=index))


@pytest.mark.parametrize("leading", [(0,), (), (2, 2)])
def test_contract_of_other_ranks(leading: tuple[int, ...]) -> None:
    check_everything(OP, *arguments(leading))


def test_compiled_and_devices() -> None:
    check_compiled(OP, *arguments(), centroid_ordered=True)
    check_device_errors(OP, *arguments())


def test_gradient() -> None:
    normed, centroids, ordering, head, active, k = map(to64, arguments((2,), 6))
    normed.requires_grad_()
    head.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: reference(x, centroids, ordering, w, active, k)[::2], (normed, head), fast_mode=True
    )


def test_errors() -> None:
    """The checks of the head itself are those of centroid_logits, tested there; here that they run, and those of k."""
    normed, centroids, ordering, head, active, k = arguments()
    check_error(OP, "centroid_topk: centroid_weight: expected [*, 24], got [7, 23] (normed has 24 columns)", normed,
                centroids[:, :23], ordering, head, active, k)
    check_error(OP, "centroid_topk: num_active: expected 1 to 7, got 8 (centroid_weight has 7 rows)", normed, centroids,
                ordering, head, 8, k)
    check_error(OP, "centroid_topk: lm_head_weight: expected float32, got float16 (normed is float32)", normed,
                centroids, ordering, head.half(), active, k)
    for bad in (0, -1, 16):
        check_error(OP, f"centroid_topk: k: expected 1 to 15, got {bad} (3 active centroids of 5 tokens)", normed,
                    centroids, ordering, head, active, bad)


def test_debug_names_the_first_offender() -> None:
    normed, centroids, ordering, head, active, k = arguments()
    normed[1, 7] = torch.inf
    check_debug_error(OP, "centroid_topk: normed[1, 7]: expected a finite value, got inf", normed, centroids, ordering,
                      head, active, k)
    ordering[5], ordering[8] = -1, 35
    check_debug_error(OP, "centroid_topk: token_ordering[5]: expected 0 to 34, got -1 (lm_head_weight has 35 rows)",
                      normed, centroids, ordering, head, active, k)
