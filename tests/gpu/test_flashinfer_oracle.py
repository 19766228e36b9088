"""draft_attention against FlashInfer's decode attention: another project's kernel, at the five real sizes."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from harness import check_numerics
from mtp_kernels.bench.peers import find_peers
from torch import Tensor

from mtp_kernels.weights import PRESETS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer"),
]

PAGE = 16
SIZES = ("E2B", "E4B", "12B", "26B-A4B", "31B")
LENGTHS = [(1,), (511,), (512,), (513,), (1024,), (4097,), (1, 513, 4097), (1024, 512, 511)]


def formula(
    dtype: torch.dtype, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: tuple[int, ...],
    window: int,
) -> Tensor:
    """Attention in `dtype` throughout, request by request; q [batch, 1, num_qo_heads, head_dim]."""
    group = q.size(2) // k_cache.size(2)
    outputs = []
    for b, length in enumerate(lengths):
        first = max(0, length - window - 1) if window >= 0 else 0
        k, v = (
            cache[table[b].long()].flatten(0, 1)[first:length].to(dtype).repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )  # [keys, num_qo_heads, head_dim]
        scores = torch.einsum("rhd,nhd->hrn", q[b].to(dtype), k) * q.size(3) ** -0.5
        outputs.append(torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v))
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("size", SIZES)
def test_agrees_with_flashinfer(size: str, layer_type: str, lengths: tuple[int, ...]) -> None:
    config = PRESETS[size]
    num_kv_heads, head_dim = config.kv_shape(layer_type)
    window = config.sliding_window - 1 if layer_type == "sliding_attention" else -1
    batch, pages = len(lengths), -(-max(lengths) // PAGE)
    generator = torch.Generator("cuda").manual_seed(sum(lengths))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    k_cache, v_cache = random(2, batch * pages, PAGE, num_kv_heads, head_dim).unbind()
    q = random(batch, 1, config.num_qo_heads, head_dim)
    order = torch.randperm(batch * pages, generator=generator, device="cuda", dtype=torch.int32)
    table, seq_lens = order.view(batch, pages), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    scale = head_dim**-0.5

    ours = torch.ops.mtp.draft_attention(q, k_cache, v_cache, table, seq_lens, scale, window_left=window)
    attend = find_peers().attention("flashinfer")(
        k_cache, v_cache, table, seq_lens, num_qo_heads=config.num_qo_heads, rows=1, window_left=window,
        sm_scale=scale, max_seq_len=max(lengths),
    )  # fmt: skip
    theirs = attend(q)

    naive, exact = (formula(d, q, k_cache, v_cache, table, lengths, window) for d in (torch.bfloat16, torch.float64))
    check_numerics(theirs, naive, exact, atol=1e-6)  # the oracle is one
    check_numerics(ours, naive, exact, atol=1e-6)
    check_numerics(ours, naive, theirs.double(), atol=1e-6)
