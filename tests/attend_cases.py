"""Problems for the tests of CUDA's kernel of draft_attention, and whether it can be run here."""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import OP, options, problem

from mtp_kernels import _attention
from mtp_kernels.ops import OPS

# head_dim, rows, query heads and KV heads: of the checkpoints, trees, and others; up to 4 queries, to 8 and to 16. And
# to 64, for Hopper.
HEADS = [
    (512, 1, 4, 2), (256, 1, 8, 4), (512, 1, 4, 1), (512, 1, 16, 1), (256, 4, 8, 4), (512, 2, 4, 2), (512, 3, 4, 4),
    (512, 4, 4, 1), (256, 3, 4, 4), (512, 1, 6, 2), (512, 5, 2, 1), (256, 1, 28, 4), (512, 2, 10, 2), (512, 3, 3, 1),
    (512, 1, 32, 4), (512, 4, 4, 2), (512, 3, 2, 1),
]
FRONTIERS = [(512, 4, 32, 4), (512, 4, 16, 1), (512, 9, 4, 2), (512, 1, 17, 1), (512, 64, 2, 2), (512, 2, 60, 2)]
LENGTHS = [[1], [33, 0, 64], [513, 1, 300], [*[40] * 5, *[0] * 30, 200, 7]]
OPTIONS: list[dict[str, Any]] = [
    {"page_size": 7, "window_left": 99, "layout": "HND"},
    {"page_size": 16, "flat": True, "layout": "2-pages"},
    {"page_size": 1, "k_scale": 0.5, "v_scale": 2.0},
    {"page_size": 16, "q_norm_weight": None, "layout": "pages-2"},
    {"page_size": 16, "rope_inv_freq": None, "positions": None},
]


def ways(heads: tuple[int, int, int, int]) -> dict[str, tuple[int, int]]:
    """Chunks of a part, and blocks that share it, by what it is."""
    c, (_, rows, query_heads, kv_heads) = _attention.config(*heads, 90), heads
    names = {1: "chunks", c.fold: "folds", 2 * c.fold: "two folds"}
    found = _attention.ways(1000, rows * (query_heads // kv_heads), c)
    return {names[way] + (", shared" if shared_by > 1 else ""): (way, shared_by) for way, shared_by in found}


def has_frontiers() -> bool:
    """Whether this GPU is one of those that serve FRONTIERS."""
    return torch.cuda.is_available() and _attention.capability_of(torch.device("cuda")) == _attention.HOPPER


def heads_here() -> list[tuple[int, int, int, int]]:
    """What this GPU's kernels serve."""
    return [*HEADS, *FRONTIERS] if has_frontiers() else HEADS


def absent() -> str:
    """Why the kernel cannot be run here, or ""."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    if _attention.capability_of(torch.device("cuda")) not in _attention.SERVED:
        return "needs a GPU with 227 KB of shared memory a block"
    found = OPS[OP].kernel(OPS[OP].kernels[0])
    return found if isinstance(found, str) else ""


def made(
    heads: tuple[int, int, int, int], lengths: list[int], device: str = "cuda", **more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with poison behind what is seen."""
    head_dim, rows, query_heads, kv_heads = heads
    extra = options(len(lengths), rows, head_dim, device=device)
    extra |= {"q_norm_weight": extra["q_norm_weight"].bfloat16(), "logits_soft_cap": 0.0}
    extra["positions"] = extra["positions"] * 811 % 262144
    sizes = {"rows": rows, "heads": (query_heads, kv_heads), "head_dim": head_dim}
    return problem(lengths, dtype=torch.bfloat16, device=device, **sizes, **{**extra, **more})
