"""Launches of a dense-head round's private kernels (_dense_round_kernels.py): pure functions of their tensors.

Tiles and splits follow the sizes of the weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
from torch import Tensor

from ._dense_round_kernels import linear_dense, pre_dense, settle_dense
from ._launch import Launch, count_sms
from ._prefetch import can_prefetch
from ._round import Pending, block_rows, new_partials, source_arguments

MOST_ROWS = 8  # of a launch: the tile of a matrix instruction
MOST_HIDDEN = 1024  # a program of what is not split has whole rows of weights in its tile
TILE_N, SPLIT_N = 32, 16  # rows of weights in a tile: of what is not split, and of what is
SPLIT_K = 2048  # columns of a split's tile: 64 KB, as MOST_HIDDEN x TILE_N, so that several share an SM
SLAB_K = 256  # columns that a warp multiplies on end
WARPS = 4
# Programs for which an SM of Hopper has room. Of the others the tiles are asked into L2, if one each is all of them.
# Microseconds of a step on an H200, batch 1 and 1024 keys, without and with: 31B 324.3 and 320.2, 26B-A4B 272.6 and
# 268.9, 12B 278.1 and 273.9; all tiles that others hold by then, too, 334.6, 277.2, 283.4.
AN_SM = 3


def settle(
    x: Pending, x_out: Tensor | None, norm: Tensor, eps: float, normed: Tensor, *, early: bool = False
) -> Launch:
    """x into `x_out`, and rmsnorm(x) * norm into `normed` [rows, hidden]."""
    args, constants = x.arguments()
    args |= {"x_out": x_out, "norm": norm, "normed": normed, "eps": float(eps)}
    warps = max(1, min(8, constants["K"] // 128))
    constants |= {"BLOCK_M": 1, "EARLY": early}
    return Launch(settle_dense, (x.shape[0],), args, constants, num_warps=warps, early=early, in_round=True)


def holds(q_projs: Sequence[Tensor]) -> bool:
    """Whether programs of an assistant with these layers hold their weights in registers until x is there.

    Then x is asked for at once, but the tile needs 66 KB of shared memory when it is multiplied. Else it goes through
    16 KB in slabs, before x is asked for, which leaves room: where an SM has two tiles of the queries, no block of
    attention fits beside those that hold them. The layer that has the fewest tiles decides for all. Microseconds of a
    step on an H200, 1024 keys, batch 1 and 8, if all hold them and if none does: 31B (256 tiles in each layer) 305.8
    and 297.9, 413.8 and 396.7; 26B-A4B (128, in the full layer 256) 261.2 and 267.1, 331.4 and 332.1; where only the
    full layer's were not held, 265.1 beside 261.4.
    """
    fewest = min(q_projs, key=lambda q_proj: q_proj.size(0))
    return triton.cdiv(fewest.size(0), TILE_N) <= count_sms(fewest.device)


def linear(
    x: Tensor, weight: Tensor, output: Tensor, *, hold: bool, gated: bool = False, early: bool = False
) -> Launch:
    """x [rows, K] @ weight.T into `output` [rows, N]; K at most MOST_HIDDEN.

    `hold`: as `holds` says. `gated`: gelu_tanh(x @ gate.T) * (x @ up.T), of weights one below the other.
    """
    splits, constants = _split(x.size(1))
    assert splits == 1
    return _linear(x, weight, output, TILE_N // 2 if gated else TILE_N, splits, constants, gated, hold, early)


def split_linear(x: Tensor, weight: Tensor, *, hold: bool, early: bool = False) -> tuple[Launch, Pending]:
    """x [rows, K] @ weight.T, its splits pending. `hold`: as `holds` says; not where x comes later than the weights."""
    splits, constants = _split(x.size(1))
    output = new_partials(x, x.size(0), splits, weight.size(0))
    return _linear(x, weight, output, SPLIT_N, splits, constants, False, hold, early), Pending(output)


def _linear(
    x: Tensor, weight: Tensor, output: Tensor, block_n: int, splits: int, constants: dict[str, int], gated: bool,
    hold: bool, early: bool
) -> Launch:
    columns = output.size(-1)
    args = {"x": x, "weight": weight, "weight_stride": weight.stride(0), "output": output, "num_rows": x.size(0)}
    grid, room = (triton.cdiv(columns, block_n), splits), AN_SM * count_sms(x.device)
    # A thread asks for an eighth of a tile's row or more, in multiples of 16 bytes, none of which is behind its end.
    whole = constants["WIDTH"] % 64 == 0 and constants["K"] % constants["WIDTH"] == 0
    asks = early and whole and room < math.prod(grid) and can_prefetch(weight)
    more = {
        "N": columns, "GATED": gated, "BLOCK_M": block_rows(x.size(0)), "BLOCK_N": block_n, "ROOM": room if asks else 0,
        "HOLD": hold and early, "EARLY": early,
    }
    return Launch(linear_dense, grid, args, {**constants, **more}, num_warps=WARPS, early=early, in_round=True)


def pre(
    weight: Tensor, embed: Tensor, embed_scale: float, state: Tensor, rows: int, *, token_ids: Tensor | None = None,
    row_index: Tensor | None = None, parts: dict[str, Tensor] | None = None, ids_out: Tensor | None = None,
    logprobs_out: Tensor | None = None, early: bool = False
) -> tuple[Launch, Pending]:
    """pre_project, as _round.pre."""
    columns = weight.size(0)
    splits, tile = _split(embed.size(1))
    output = new_partials(state, rows, 2 * splits, columns)
    args, constants = source_arguments(embed, embed_scale, state, token_ids, row_index, parts, ids_out, logprobs_out)
    args |= {"weight": weight, "weight_stride": weight.stride(0), "output": output, "num_rows": rows}
    constants |= {
        **tile, "N": columns, "BLOCK_M": block_rows(rows), "BLOCK_N": SPLIT_N, "HOLD": early, "EARLY": early
    }
    grid = (triton.cdiv(columns, SPLIT_N), 2 * splits)
    return Launch(pre_dense, grid, args, constants, num_warps=WARPS, early=early, in_round=True), Pending(output)


def _split(inner: int) -> tuple[int, dict[str, int]]:
    """(splits, constants): as many tiles as it takes, of equal widths."""
    splits = triton.cdiv(inner, SPLIT_K)
    width = triton.cdiv(inner, 16 * splits) * 16
    columns = max(16, triton.next_power_of_2(width))
    slabs = _slabs(columns)
    return splits, {"K": inner, "SPLITS": splits, "WIDTH": width, "SLABS": slabs, "SLAB_K": columns // slabs}


def _slabs(columns: int) -> int:
    """One for each warp at least, of 16 columns at least."""
    return max(min(WARPS, columns // 16), columns // SLAB_K)
