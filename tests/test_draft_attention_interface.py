"""draft_attention: supports(), CUDA graphs, error messages, content checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import (
    FP8,
    OP,
    each_implementation,
    options,
    problem,
)
from harness import (
    assert_same_bits,
    call,
    check_debug_error,
    check_error,
    forced,
)
from torch import Tensor

import mtp_kernels


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cuda"])
@each_implementation
def test_cuda_graph(device: str, implementation: str) -> None:
    """Captured without a synchronisation; replays see new lengths, tables and queries."""
    extra = options(3, 2, device=device)
    args, kwargs = problem([13, 0, 7], device=device, poison=0.5, **extra)
    q, _, _, table, seq_lens, _ = args
    with forced(implementation):
        call(OP, *args, **kwargs)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                captured = call(OP, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        table.copy_(table.flip(0))
        seq_lens.copy_(seq_lens.flip(0))
        q.mul_(0.5)
        graph.replay()
        assert_same_bits(captured, call(OP, *args, **kwargs))


def test_supports() -> None:
    good = {"head_dim": 512, "num_qo_heads": 16, "num_kv_heads": 2, "page_size": 64, "kv_dtype": FP8}
    assert mtp_kernels.supports(OP, dtype=torch.bfloat16, **good) == (True, "")
    for change, reason in (
        ({"head_dim": 63}, "head_dim 63 is not even"),
        ({"num_kv_heads": 3}, "16 query heads are not a multiple of 3 KV heads"),
        ({"page_size": 0}, "page_size 0 is not at least 1"),
        ({"kv_dtype": torch.float8_e5m2},
         "kv_dtype float8_e5m2 is not bfloat16 or float16 or float32 or float8_e4m3fn"),
    ):
        assert mtp_kernels.supports(OP, **{**good, **change}) == (False, reason)
    with pytest.raises(mtp_kernels.ArgumentError, match="heads"):
        mtp_kernels.supports(OP, heads=3)


def test_errors() -> None:
    (q, k, v, table, lens, scale), _ = problem([9, 4])
    flat, indptr = table.flatten(), torch.tensor([0, 2, 3])
    fp8, one = k.to(FP8), torch.ones(1)
    freqs, positions = torch.ones(32), torch.tensor([1, 2])

    def bad(message: str, *change: Any, **kwargs: Any) -> None:
        args = [q, k, v, table, lens, scale]
        for i, value in zip(change[::2], change[1::2]):
            args[i] = value
        check_error(OP, f"draft_attention: {message}", *args, **kwargs)

    bad("q: expected 4 dimensions, got 3 ([2, 2, 4])", 0, q[..., 0])
    bad("q: expected bfloat16 or float16 or float32, got float64", 0, q.double())
    bad("q: expected an even head_dim, got 63", 0, q[..., :63])
    bad("q: expected a contiguous last dimension, got strides [512, 256, 1, 4]", 0,
        q.transpose(2, 3).contiguous().transpose(2, 3))
    bad("k_cache: expected [*, *, *, 64], got [5, 5, 2, 62] (head_dim of q is 64)", 1, k[..., :62])
    bad("k_cache: expected [*, *, *, 64], got [5, 5, 64] (head_dim of q is 64)", 1, k[:, :, 0])
    bad("k_cache: expected bfloat16 or float8_e4m3fn, got float32 (q is bfloat16)", 0, q.bfloat16())
    bad("k_cache: expected float32 or float8_e4m3fn, got float8_e5m2 (q is float32)", 1, k.to(torch.float8_e5m2))
    bad("k_cache: expected at least 1 KV head, got 0", 1, k[:, :, :0])
    bad("k_cache: expected a number of KV heads that divides 4, got 3 (q has 4 heads)",
        1, k.new_empty(5, 5, 3, 64), 2, v.new_empty(5, 5, 3, 64))
    bad("k_cache: expected a contiguous last dimension, got strides [640, 128, 1, 2]",
        1, k.transpose(2, 3).contiguous().transpose(2, 3))
    bad("v_cache: expected [5, 5, 2, 64], got [4, 5, 2, 64] (the shape of k_cache)", 2, v[1:])
    bad("v_cache: expected float32, got float16 (k_cache is float32)", 2, v.half())
    bad("k_scale: expected a tensor, got None (k_cache is float8_e4m3fn)", 1, fp8, 2, fp8)
    bad("v_scale: expected a tensor, got None (k_cache is float8_e4m3fn)", 1, fp8, 2, fp8, k_scale=one)
    bad("k_scale: expected one element or [2], got [4] (k_cache has 2 KV heads)", k_scale=torch.ones(4))
    bad("v_scale: expected float32, got bfloat16", v_scale=one.bfloat16())
    bad("block_table: expected [2, *], got [1, 3] (batch of q is 2)", 3, table[:1])
    bad("block_table: expected [2, *], got [6] (batch of q is 2)", 3, flat)
    bad("block_table: expected [*], got [2, 3] (flat beside kv_indptr)", kv_indptr=indptr)
    bad("block_table: expected int32 or int64, got int16", 3, table.short())
    bad("block_table: expected a contiguous last dimension, got strides [1, 2]", 3, table.t().contiguous().t())
    bad("kv_indptr: expected [3], got [2] (batch of q is 2)", 3, flat, kv_indptr=indptr[1:])
    bad("kv_indptr: expected int32 or int64, got float32", 3, flat, kv_indptr=indptr.float())
    bad("seq_lens: expected [2], got [1] (batch of q is 2)", 4, lens[:1])
    bad("seq_lens: expected int32 or int64, got float32", 4, lens.float())
    bad("max_seq_len: expected at least -1, got -2", max_seq_len=-2)
    bad("logits_soft_cap: expected a finite value of at least 0, got -1.0", logits_soft_cap=-1.0)
    bad("logits_soft_cap: expected a finite value of at least 0, got nan", logits_soft_cap=torch.nan)
    bad("q_norm_weight: expected [64], got [1] (head_dim of q is 64)", q_norm_weight=one)
    bad("q_norm_weight: expected float32, got float16 (q is float32)", q_norm_weight=torch.ones(64).half())
    bad("rope_inv_freq: expected a tensor, got None (positions is given)", positions=positions)
    bad("positions: expected a tensor, got None (rope_inv_freq is given)", rope_inv_freq=freqs)
    bad("rope_inv_freq: expected 1 dimensions, got 2 ([1, 32])", rope_inv_freq=freqs[None], positions=positions)
    bad("rope_inv_freq: expected float32, got float16", rope_inv_freq=freqs.half(), positions=positions)
    bad("rope_inv_freq: expected at most 32 pairs, got 33 (head_dim of q is 64)", rope_inv_freq=torch.ones(33),
        positions=positions)
    bad("positions: expected [2] or [2, 2], got [2, 1] (q has batch 2 and 2 rows)", rope_inv_freq=freqs,
        positions=positions[:, None])
    bad("positions: expected int32 or int64, got float32", rope_inv_freq=freqs, positions=positions.float())


def test_errors_name_a_tensor_on_another_device() -> None:
    args, _ = problem([9, 4])
    with pytest.raises(mtp_kernels.ArgumentError) as error:
        call(OP, *args[:3], args[3].to("meta"), *args[4:])
    assert str(error.value) == "draft_attention: block_table: expected cpu, got meta (q is on cpu)"


def test_debug_names_the_first_offender() -> None:
    (q, k, v, table, lens, scale), _ = problem([9, 4], poison=0.0)
    flat, indptr = torch.cat([table[0, :2], table[1, :1]]), torch.tensor([0, 2, 3])

    def bad(message: str, *change: Any, **kwargs: Any) -> None:
        args = [q, k, v, table, lens, scale]
        for i, value in zip(change[::2], change[1::2]):
            args[i] = value
        check_debug_error(OP, f"draft_attention: {message}", *args, **kwargs)

    def but(tensor: Tensor, index: tuple[int, ...] | int, value: float) -> Tensor:
        changed = tensor.clone()
        changed[index] = value
        return changed

    bad("q[1, 0, 3, 7]: expected a finite value, got nan", 0, but(q, (1, 0, 3, 7), torch.nan))
    bad("k_scale: expected a finite value, got inf", k_scale=torch.tensor(torch.inf))
    bad("seq_lens[1]: expected 0 to 15, got 16 (block_table has 3 pages of 5 keys a request)", 4, but(lens, 1, 16))
    bad("seq_lens[0]: expected 0 to 15, got -1 (block_table has 3 pages of 5 keys a request)", 4, but(lens, 0, -1))
    bad("seq_lens[0]: expected 0 to 8, got 9 (max_seq_len is 8)", max_seq_len=8)
    bad("block_table[1, 0]: expected 0 to 4, got 999 (k_cache has 5 pages)", 3, but(table, (1, 0), 999))
    bad("block_table[2]: expected 0 to 4, got -1 (k_cache has 5 pages)", 3, but(flat, 2, -1), kv_indptr=indptr)
    bad("kv_indptr[2]: expected 0 to 3, got 4 (block_table has 3 entries)", 3, flat, kv_indptr=but(indptr, 2, 4))
    bad("kv_indptr[2]: expected at least the value before it, got 1", 3, flat, kv_indptr=but(indptr, 2, 1))
    bad("seq_lens[1]: expected 0 to 5 times the request's pages in kv_indptr, got 6", 3, flat, 4, but(lens, 1, 6),
        kv_indptr=indptr)
    page = int(table[0, 1])
    bad(f"k_cache[{page}, 3, 1, 5]: expected a finite value, got inf (visible to request 0)",
        1, but(k, (page, 3, 1, 5), torch.inf))
    bad(f"v_cache[{page}, 0, 0, 0]: expected a finite value, got nan (visible to request 0)",
        2, but(v, (page, 0, 0, 0), torch.nan))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("window_left", [-1, 0, 6])
def test_debug_accepts_garbage_that_is_not_visible(flat: bool, window_left: int) -> None:
    args, kwargs = problem([0, 13, 7, 0, 22], window_left=window_left, flat=flat)
    expected = call(OP, *args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTP_DEBUG", "1")
        assert_same_bits(call(OP, *args, **kwargs), expected)
