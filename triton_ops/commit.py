"""Triton kernel of commit: every program finds the cut of its request, then copies a tile of the seed state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Launch


@dataclass(frozen=True)
class Config:
    block_width: int
    block_stops: int  # stop ids that are compared at a time
    block_state: int  # elements of the seed state a program
    num_warps: int = 4


def config(width: int, num_stops: int, element_size: int) -> Config:
    """2 KB of state a program: one 16-byte load a thread, so a row of 5376 bf16 is copied by 6 SMs at once."""
    block_width = max(16, triton.next_power_of_2(width))
    block_stops = max(1, min(triton.next_power_of_2(max(num_stops, 1)), 4096 // block_width))
    return Config(block_width, block_stops, 2048 // element_size)


def commit(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`torch.ops.mtp.commit` on a GPU."""
    launches, results = plan(accept_index, num_accepted, accept_ids, target_hidden, stop_ids=stop_ids)
    for launch in launches:
        launch.run()
    return results


def plan(
    accept_index: Tensor, num_accepted: Tensor, accept_ids: Tensor, target_hidden: Tensor, *,
    stop_ids: Tensor | None = None
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    batch, width = accept_index.shape
    num_rows, backbone = target_hidden.shape
    num_stops = 0 if stop_ids is None else stop_ids.size(0)
    chosen = config(width, num_stops, target_hidden.element_size())
    output_ids = accept_ids.new_empty((batch, width), dtype=torch.int64)
    num_output, seed_ids = (accept_ids.new_empty((batch,), dtype=torch.int64) for _ in range(2))
    finished = accept_ids.new_empty((batch,), dtype=torch.bool)
    seed_state = target_hidden.new_empty((batch, backbone))
    args = {
        "accept_index": accept_index, "num_accepted": num_accepted, "accept_ids": accept_ids,
        "target_hidden": target_hidden, "stop_ids": stop_ids if num_stops else None, "output_ids": output_ids,
        "num_output": num_output, "finished": finished, "seed_ids": seed_ids, "seed_state": seed_state,
        "width": width, "num_rows": num_rows, "backbone": backbone, "num_stops": num_stops,
        "stride_index_b": accept_index.stride(0), "stride_ids_b": accept_ids.stride(0),
        "stride_hidden_t": target_hidden.stride(0),
    }
    constants = {
        "BLOCK_WIDTH": chosen.block_width, "BLOCK_STOPS": chosen.block_stops, "BLOCK_STATE": chosen.block_state
    }
    grid = (batch, max(1, triton.cdiv(backbone, chosen.block_state)))
    launch = Launch(_commit_kernel, grid, args, constants, num_warps=chosen.num_warps)
    return [launch], (output_ids, num_output, finished, seed_ids, seed_state)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _commit_kernel(
    accept_index,  # [batch, width]
    num_accepted,  # [batch]
    accept_ids,  # [batch, width]
    target_hidden,  # [num_rows, backbone]
    stop_ids,  # [num_stops] or None
    output_ids,  # [batch, width]
    num_output, finished, seed_ids,  # [batch]
    seed_state,  # [batch, backbone]
    width, num_rows, backbone, num_stops, stride_index_b, stride_ids_b, stride_hidden_t,
    BLOCK_WIDTH: tl.constexpr, BLOCK_STOPS: tl.constexpr, BLOCK_STATE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_WIDTH)
    inside = place < width
    ids = tl.load(accept_ids + request * stride_ids_b + place, mask=inside, other=-1).to(tl.int64)
    rows = tl.load(accept_index + request * stride_index_b + place, mask=inside, other=0).to(tl.int64)
    accepted = tl.load(num_accepted + request).to(tl.int64)
    last = tl.minimum(tl.maximum(accepted, 0), width - 1).to(tl.int32)

    stop = tl.full([], BLOCK_WIDTH, tl.int32)  # the first place of a stop id
    if stop_ids is not None:
        for start in range(0, num_stops, BLOCK_STOPS):
            which = start + tl.arange(0, BLOCK_STOPS)
            stops = tl.load(stop_ids + which, mask=which < num_stops, other=-1).to(tl.int64)
            stopping = (ids[:, None] == stops[None, :]) & (ids >= 0)[:, None]
            stop = tl.minimum(stop, tl.min(tl.min(tl.where(stopping, place[:, None], BLOCK_WIDTH), axis=1), axis=0))
    is_finished = stop <= last
    last = tl.minimum(last, stop)
    row = tl.sum(tl.where(place == last, rows, 0), axis=0)
    row = tl.minimum(tl.maximum(row, 0), num_rows - 1)

    column = tl.program_id(1) * BLOCK_STATE + tl.arange(0, BLOCK_STATE)
    state = tl.load(target_hidden + row * stride_hidden_t + column, mask=column < backbone)
    tl.store(seed_state + request * backbone + column, state, mask=column < backbone)
    if tl.program_id(1) == 0:
        tl.store(output_ids + request * width + place, tl.where(place <= last, ids, -1), mask=inside)
        tl.store(num_output + request, (last + 1).to(tl.int64))
        tl.store(finished + request, is_finished)
        tl.store(seed_ids + request, tl.sum(tl.where(place == last, ids, 0), axis=0))
