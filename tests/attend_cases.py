"""Problems for the tests of CUDA's kernel of draft_attention, and whether it can be run here."""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import OP, options, problem

from mtp_kernels import _attention
from mtp_kernels.ops import OPS


def absent() -> str:
    """Why the kernel cannot be run here, or ""."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if _attention.capability_of(torch.device("cuda")) not in _attention.SERVED:
        return "needs a GPU with 227 KB of shared memory a block"
    found = OPS[OP].kernel(OPS[OP].kernels[0])
    return found if isinstance(found, str) else ""


def made(heads: tuple[int, int, int], lengths: list[int], **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with poison behind what is seen, on the GPU."""
    rows, query_heads, kv_heads = heads
    extra = options(len(lengths), rows, 512, device="cuda")
    extra |= {"q_norm_weight": extra["q_norm_weight"].bfloat16(), "logits_soft_cap": 0.0}
    extra["positions"] = extra["positions"] * 811 % 262144
    return problem(lengths, rows=rows, heads=(query_heads, kv_heads), head_dim=512, dtype=torch.bfloat16, device="cuda",
                   **{**extra, **more})
