"""Launcher of verify_sample: sums of all rows a walk may stand at, the walk with the sums of what it leaves, the draw.

A vocabulary is cut into chunks of a fixed size, and sums of chunks are added in a fixed order, so a request's result
does not depend on the batch. The rows of inner nodes are summed before it is known which of them the walk will visit:
one launch at full bandwidth instead of one launch a level. Leaves are left out: nothing is tried there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ._launch import Launch
from ._tree import row_strides
from ._verify_sample import draw_kernel, row_sums_kernel, walk_kernel


@dataclass(frozen=True)
class Config:
    """`chunk` columns a program: 16 a thread of 4 warps, in 16-byte loads; a vocabulary of 262144 has 128 chunks."""

    chunk: int
    num_chunks: int
    block_chunks: int  # num_chunks, padded
    block_nodes: int
    num_warps: int = 4


def config(vocab: int, num_nodes: int) -> Config:
    chunk = min(2048, max(64, triton.next_power_of_2(vocab)))
    num_chunks = triton.cdiv(vocab, chunk)
    return Config(chunk, num_chunks, triton.next_power_of_2(num_chunks), max(16, triton.next_power_of_2(num_nodes)))


def verify_sample(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.ops.mtp.verify_sample` on a GPU."""
    launches, results = plan(
        draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs, uniform, uniform_final,
        max_depth, draft_probs=draft_probs,
    )
    for launch in launches:
        launch.run()
    return results


def plan(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_probs: Tensor, uniform: Tensor, uniform_final: Tensor, max_depth: int, *, draft_probs: Tensor | None = None
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    batch, num_nodes = draft_ids.shape
    vocab = target_probs.size(-1)
    chosen = config(vocab, num_nodes)
    chunks, sources = chosen.num_chunks, 1 if draft_probs is None else 2
    accept_index, accept_ids = (draft_ids.new_empty((batch, max_depth + 1), dtype=torch.int64) for _ in range(2))
    num_accepted = draft_ids.new_empty((batch,), dtype=torch.int64)
    totals = uniform.new_empty((batch, num_nodes, sources, chunks), dtype=torch.float64)
    left = uniform.new_empty((batch, 2, chunks), dtype=torch.float64)
    scales = uniform.new_empty((batch, 2), dtype=torch.float64)
    ends = draft_ids.new_empty((batch, 4), dtype=torch.int64)

    probs: dict[str, Any] = {
        "target_probs": target_probs, "draft_probs": draft_probs, **row_strides(target_probs, num_nodes, 1),
        "stride_draft_b": 0 if draft_probs is None else draft_probs.stride(0),
        "stride_draft_n": 0 if draft_probs is None else draft_probs.stride(1), "vocab": vocab,
    }
    links = {
        "draft_ids": draft_ids, "retrieve_index": retrieve_index, "retrieve_next_token": retrieve_next_token,
        "retrieve_next_sibling": retrieve_next_sibling, "stride_ids_b": draft_ids.stride(0),
        "stride_index_b": retrieve_index.stride(0), "stride_token_b": retrieve_next_token.stride(0),
        "stride_sibling_b": retrieve_next_sibling.stride(0), "num_nodes": num_nodes,
    }
    num_rows = target_probs.numel() // max(vocab, 1)
    workspace = {"left": left, "scales": scales, "ends": ends}
    sums_args = {
        "retrieve_index": retrieve_index, "retrieve_next_token": retrieve_next_token, "totals": totals,
        "stride_index_b": retrieve_index.stride(0), "stride_token_b": retrieve_next_token.stride(0),
        "num_nodes": num_nodes, "num_rows": num_rows, **probs,
    }
    walk_args = {
        "uniform": uniform, "totals": totals, "accept_index": accept_index, "num_accepted": num_accepted,
        "accept_ids": accept_ids, "stride_uniform_b": uniform.stride(0), "num_rows": num_rows, "width": max_depth + 1,
        **links, **probs, **workspace,
    }
    draw_args = {
        "uniform_final": uniform_final, "accept_ids": accept_ids, "num_rows": num_rows, "width": max_depth + 1,
        **links, **probs, **workspace,
    }
    constants = {"CHUNK": chosen.chunk, "NUM_CHUNKS": chunks}
    block_chunks = {"BLOCK_CHUNKS": chosen.block_chunks}
    block_nodes = {"BLOCK_NODES": chosen.block_nodes}
    warps = chosen.num_warps
    launches = [
        Launch(row_sums_kernel, (batch * num_nodes, chunks, sources), sums_args, constants, num_warps=warps),
        Launch(walk_kernel, (batch, chunks), walk_args, constants | block_chunks | block_nodes, num_warps=warps),
        Launch(draw_kernel, (batch,), draw_args, constants | block_chunks, num_warps=warps),
    ]
    if min(max_depth, num_nodes - 1) == 0:  # nothing will be tried
        launches = launches[1:]
    return launches, (accept_index, num_accepted, accept_ids)
