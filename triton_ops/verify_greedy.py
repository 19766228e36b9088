"""Triton kernel of verify_greedy: one warp a request follows the links.

Every step depends on the one before it, and what it reads (a few hundred bytes a request) is in L1 after the first
touch: about 40 cycles a hop, less than exchanging registers between lanes would take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Launch
from ._tree import fill_behind, has_row, load_link, row_offset, row_strides

BLOCK_PATH = 32  # places of a path that are filled at a time: one a lane


def verify_greedy(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_ids: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.ops.mtp.verify_greedy` on a GPU."""
    launches, results = plan(
        draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_ids, max_depth
    )
    for launch in launches:
        launch.run()
    return results


def plan(
    draft_ids: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor,
    target_ids: Tensor, max_depth: int
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    batch, num_nodes = draft_ids.shape
    accept_index, accept_ids = (draft_ids.new_empty((batch, max_depth + 1), dtype=torch.int64) for _ in range(2))
    num_accepted = draft_ids.new_empty((batch,), dtype=torch.int64)
    args = {
        "draft_ids": draft_ids, "retrieve_index": retrieve_index, "retrieve_next_token": retrieve_next_token,
        "retrieve_next_sibling": retrieve_next_sibling, "target_ids": target_ids, "accept_index": accept_index,
        "num_accepted": num_accepted, "accept_ids": accept_ids, "num_nodes": num_nodes,
        "num_rows": target_ids.numel(), "width": max_depth + 1, "stride_ids_b": draft_ids.stride(0),
        "stride_index_b": retrieve_index.stride(0), "stride_token_b": retrieve_next_token.stride(0),
        "stride_sibling_b": retrieve_next_sibling.stride(0), **row_strides(target_ids, num_nodes, 0),
    }
    launch = Launch(_verify_greedy_kernel, (batch,), args, {"BLOCK_PATH": BLOCK_PATH}, num_warps=1)
    return [launch], (accept_index, num_accepted, accept_ids)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _verify_greedy_kernel(
    draft_ids, retrieve_index, retrieve_next_token, retrieve_next_sibling,  # [batch, num_nodes]
    target_ids,  # [num_rows] or [batch, num_nodes]
    accept_index,  # [batch, width]
    num_accepted,  # [batch]
    accept_ids,  # [batch, width]
    num_nodes, num_rows, width, stride_ids_b, stride_index_b, stride_token_b, stride_sibling_b,
    stride_target_b, stride_target_n, rows_per_request,
    BLOCK_PATH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    draft_ids += request * stride_ids_b
    retrieve_index += request * stride_index_b
    retrieve_next_token += request * stride_token_b
    retrieve_next_sibling += request * stride_sibling_b
    accept_index += request * width
    accept_ids += request * width
    most = tl.minimum(width, num_nodes) - 1

    row = tl.load(retrieve_index).to(tl.int64)  # of `node`
    tl.store(accept_index, row)
    node = tl.where(has_row(row, num_rows), 0, -1)
    reached = 0  # nodes of the path
    while node >= 0:
        offset = row_offset(row, rows_per_request, stride_target_b, stride_target_n)
        token = tl.load(target_ids + offset).to(tl.int64)
        child = load_link(retrieve_next_token, tl.where(reached < most, node, -1), num_nodes)
        tl.store(accept_index + reached, row)
        tl.store(accept_ids + reached, token)  # of the child that is taken next, or the bonus where none is
        node = tl.full([], -1, tl.int32)
        tries = 0
        while (child >= 0) & (tries < num_nodes):
            child_row = tl.load(retrieve_index + child).to(tl.int64)
            sibling = load_link(retrieve_next_sibling, child, num_nodes)
            taken = (tl.load(draft_ids + child).to(tl.int64) == token) & has_row(child_row, num_rows)
            node = tl.where(taken, child, -1)
            row = tl.where(taken, child_row, row)
            child = tl.where(taken, -1, sibling)
            tries += 1
        reached += 1
    tl.store(num_accepted + request, tl.maximum(reached - 1, 0).to(tl.int64))
    fill_behind(accept_index, tl.maximum(reached, 1), width, BLOCK_PATH)
    fill_behind(accept_ids, reached, width, BLOCK_PATH)
