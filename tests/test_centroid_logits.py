"""centroid_logits against fp64, its order of candidates, and its errors."""

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
from head_cases import INDICES, LargestFp32, check_reads_nothing, check_rows_alone, check_threads, integers

from mtp_kernels import reorder_lm_head
from mtp_kernels.reference.centroid_logits import centroid_logits as reference

OP = "centroid_logits"
ACTIVE = 3


def arguments(leading: tuple[int, ...] = (3,), hidden: int = 24, num_centroids: int = 7, size: int = 5,
              dtype: torch.dtype = torch.float32, device: str = "cpu", index: torch.dtype = torch.int64
              ) -> tuple[Any, ...]:
    vocab = num_centroids * size
    normed = random_tensor(*leading, hidden, seed=1, dtype=dtype, device=device)
    centroids = random_tensor(num_centroids, hidden, seed=2, dtype=dtype, device=device, scale=0.3)
    ordering = torch.randperm(vocab, generator=torch.Generator().manual_seed(3)).to(index).to(device)
    head = random_tensor(vocab, hidden, seed=4, dtype=dtype, device=device, scale=0.3)
    return normed, centroids, ordering, head, ACTIVE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), (0,), ()])
def test_against_fp64(device: str, implementation: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    args = arguments(leading, 96, 12, 9, dtype, device)
    with forced(implementation):
        logits, ids = call(OP, *args)
    exact, exact_ids = reference(*map(to64, args))
    assert ids.tolist() == exact_ids.tolist()
    naive = (args[0] @ args[3].T).gather(-1, exact_ids)
    check_numerics(logits, naive, exact, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("index", INDICES)
def test_best_centroid_first(device: str, implementation: str, dtype: torch.dtype, ordered: bool, index: torch.dtype
                             ) -> None:
    """Exact inputs with many ties between centroids: the lower centroid comes first, its tokens as ordered."""
    _, _, ordering, _, _ = arguments((), 8, 10, 4, index=index, device=device)
    normed, centroids = (integers(n, 8, seed=n, dtype=dtype, device=device) for n in (20, 10))
    head = integers(40, 8, seed=9, dtype=dtype, device=device)
    with forced(implementation):
        logits, ids = call(OP, normed, centroids, ordering, reorder_lm_head(head, ordering) if ordered else head, 6,
                           centroid_ordered=ordered)
    scores, exact = normed.double() @ centroids.double().T, normed.double() @ head.double().T
    assert any(len(set(row)) < 10 for row in scores.tolist())
    groups = ordering.view(10, 4).tolist()
    for row in range(20):
        best = sorted(range(10), key=lambda c: (-scores[row, c].item(), c))[:6]
        expected = [token for c in best for token in groups[c]]
        assert ids[row].tolist() == expected
        assert logits[row].tolist() == exact[row, expected].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
def test_nan_scores_rank_last(device: str, implementation: str) -> None:
    normed, centroids, ordering, head, _ = arguments(device=device)
    centroids[2] = torch.nan
    with forced(implementation):
        _, ids = call(OP, normed, centroids, ordering, head, 7)
        assert (ids[:, -5:] == ordering.view(7, 5)[2]).all()
        centroids[4] = -torch.inf  # -inf or NaN with either sign of the hidden: level with NaN
        normed = normed.abs()
        _, ids = call(OP, normed, centroids, ordering, head, 7)
        assert (ids[:, -10:] == ordering.view(7, 5)[[2, 4]].flatten()).all()
        normed[1] = torch.nan
        logits, ids = call(OP, normed, centroids, ordering, head, ACTIVE)
    assert ids[1].tolist() == ordering[: 5 * ACTIVE].tolist()
    assert logits[1].isnan().all() and logits[[0, 2]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_alone(device: str, implementation: str, dtype: torch.dtype) -> None:
    normed, *rest = arguments((18,), 64, 20, 9, dtype, device)
    if device == "cpu":
        normed = integers(18, 64, seed=1, dtype=dtype)
        rest[0], rest[2] = (integers(n, 64, seed=n, dtype=dtype) for n in (20, 180))
    check_rows_alone(OP, implementation, normed, *rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", implementations(OP))
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("index", INDICES)
def test_wild_ordering_is_clamped(device: str, implementation: str, ordered: bool, index: torch.dtype) -> None:
    normed, centroids, ordering, head, _ = arguments(device=device, index=index)
    wild = [-1, 35, torch.iinfo(index).min, torch.iinfo(index).max] + [2**40] * (index == torch.int64)
    ordering[: len(wild)] = torch.tensor(wild, device=device)
    with forced(implementation):
        got = call(OP, normed, centroids, ordering, head, 7, centroid_ordered=ordered)
        expected = call(OP, normed, centroids, ordering.clamp(0, 34), head, 7, centroid_ordered=ordered)
    assert_same_bits(got[0], expected[0])
    assert_same_bits(got[1], expected[1])


@pytest.mark.kernels_only
@pytest.mark.parametrize("implementation", [i for i in implementations(OP) if i != "triton"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_and_threads_change_no_bits(implementation: str, dtype: torch.dtype) -> None:
    """Random values, whose sums show any other order, and sizes that no vector divides."""
    normed, *rest = arguments((71,), 87, 150, 7, dtype)
    check_rows_alone(OP, implementation, normed, *rest)
    check_threads(OP, implementation, normed, *rest)


def test_only_chosen_rows_are_converted() -> None:
    args = arguments((2,), 64, 128, 8, torch.bfloat16)
    with LargestFp32() as largest:
        reference(*args)
    assert largest.numel == 128 * 64  # the centroids; the chosen rows are fewer, the head 8 times as large


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
    normed, centroids, ordering, head, active = map(to64, arguments((2,), 6))
    normed.requires_grad_()
    head.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: reference(x, centroids, ordering, w, active)[0], (normed, head), fast_mode=True
    )


def test_errors() -> None:
    normed, centroids, ordering, head, active = arguments()

    def error(message: str, x: Any = normed, c: Any = centroids, o: Any = ordering, w: Any = head, n: int = active
              ) -> None:
        check_error(OP, f"centroid_logits: {message}", x, c, o, w, n)

    error("normed: expected at least 1 dimensions, got 0 ([])", x=normed.new_empty(()))
    error("normed: expected bfloat16 or float16 or float32, got float64", x=normed.double())
    error("centroid_weight: expected [*, 24], got [7, 23] (normed has 24 columns)", c=centroids[:, :23])
    error("centroid_weight: expected float32, got float16 (normed is float32)", c=centroids.half())
    error("num_active: expected 1 to 7, got 8 (centroid_weight has 7 rows)", n=8)
    error("num_active: expected 1 to 7, got 0 (centroid_weight has 7 rows)", n=0)
    error("num_active: expected 1 to 0, got 1 (centroid_weight has 0 rows)", c=centroids[:0], n=1)
    error("token_ordering: expected 1 dimensions, got 2 ([7, 5])", o=ordering.view(7, 5))
    error("token_ordering: expected int32 or int64, got float32", o=ordering.float())
    error("token_ordering: expected a multiple of 7 entries, got 34 (centroid_weight has 7 rows)", o=ordering[:34])
    error("token_ordering: expected a multiple of 7 entries, got 0 (centroid_weight has 7 rows)", o=ordering[:0])
    error("lm_head_weight: expected [35, 24], got [34, 24] (token_ordering has 35, normed has 24 columns)", w=head[:34])
    error("lm_head_weight: expected [35, 24], got [35, 23] (token_ordering has 35, normed has 24 columns)",
          w=head[:, :23])
    error("lm_head_weight: expected float32, got bfloat16 (normed is float32)", w=head.bfloat16())
    error("lm_head_weight: expected a contiguous last dimension, got strides [1, 35]", w=torch.empty(24, 35).t())
    error("token_ordering: expected a contiguous last dimension, got strides [2]", o=torch.zeros(70).long()[::2])


def test_debug_names_the_first_offender() -> None:
    normed, centroids, ordering, head, active = arguments()
    head[3, 2] = torch.nan
    check_debug_error(OP, "centroid_logits: lm_head_weight[3, 2]: expected a finite value, got nan", normed, centroids,
                      ordering, head, active)
    ordering[5], ordering[8] = 35, -1
    check_debug_error(OP, "centroid_logits: token_ordering[5]: expected 0 to 34, got 35 (lm_head_weight has 35 rows)",
                      normed, centroids, ordering, head, active)
