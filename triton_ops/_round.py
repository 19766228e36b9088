"""Launches of a round's private kernels (_round_kernels.py): pure functions of their tensors, as an op's `plan` is.

`Pending` is what a projection leaves for the next kernel to finish. Tiles follow the sizes of the weights alone, but
for the number of rows that share a program, which no bit depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ._launch import Launch
from ._round_kernels import finish_round, geglu_round, linear_round, norm_linear_round, pre_round, settle_round

MOST_ROWS = 16  # of a program: the tile of a matrix instruction
MOST_HIDDEN = 512  # a program holds whole rows, and a tile of weights as deep
GROUP = 8  # centroids of which the largest score is told: most groups then have none of the chosen
MOST_SUMMED = 8  # rows whose splits every program adds for itself; of more, a kernel of its own does
PRE_SPLITS = 4  # of each half of pre_project's columns
SPLIT_K = 256  # columns of x a split of other projections


@dataclass(frozen=True)
class Pending:
    """x in the making: rows whose splits are to be added, and with `norm` to be normed and added to `residual`.

    Without `partials` it is made: `residual` itself.
    """

    partials: Tensor | None  # [rows, splits, hidden] fp32
    residual: Tensor | None = None  # [rows, hidden]
    norm: Tensor | None = None  # [hidden]
    scale: Tensor | None = None  # one element

    def after(self, residual: Tensor, norm: Tensor, scale: Tensor | None = None) -> Pending:
        return replace(self, residual=residual, norm=norm, scale=scale)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, splits, hidden."""
        if self.partials is None:
            assert self.residual is not None
            return self.residual.size(0), 0, self.residual.size(1)
        rows, splits, hidden = self.partials.shape
        return rows, splits, hidden

    def arguments(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Arguments and constants of a kernel that takes this in."""
        rows, splits, hidden = self.shape
        args = {
            "partials": self.partials, "residual": self.residual, "post_norm": self.norm, "scale": self.scale,
            "num_rows": rows,
        }
        return args, {"K": hidden, "SPLITS": splits, "BLOCK_M": block_rows(rows)}


def settle(
    x: Pending, x_out: Tensor, eps: float, *, early: bool = False
) -> tuple[list[Launch], Pending, Tensor | None]:
    """Finishes many rows in a launch of its own: then x is pending no more. Where the next kernel has to leave x."""
    args, constants = x.arguments()
    if x.shape[0] <= MOST_SUMMED:
        return [], x, x_out
    args |= {"x_out": x_out, "eps": float(eps)}
    grid = (x.shape[0],)
    constants |= {"BLOCK_M": 1, "EARLY": early}
    launch = Launch(settle_round, grid, args, constants, num_warps=1, early=early, in_round=True)
    return [launch], Pending(None, x_out), None


def pre(
    weight: Tensor, embed: Tensor, embed_scale: float, state: Tensor, rows: int, *, token_ids: Tensor | None = None,
    row_index: Tensor | None = None, parts: dict[str, Tensor] | None = None, ids_out: Tensor | None = None,
    logprobs_out: Tensor | None = None, early: bool = False
) -> tuple[Launch, Pending]:
    """pre_project of `token_ids` [batch, rows each], or of the best candidates in `parts` of the last head.

    state [batch, prev_rows, backbone]; `ids_out` and `logprobs_out` [rows], with one stride, get the candidates.
    """
    hidden, backbone = weight.size(0), embed.size(1)
    block_n, warps = tile(hidden)
    block_k = next((size for size in (128, 64) if backbone % (size * PRE_SPLITS) == 0), 16)
    splits = min(PRE_SPLITS, triton.cdiv(backbone, block_k))
    # Few rows are two programs': 64 programs leave SMs idle. Microseconds of this kernel in a step of E4B on an H200,
    # 8 rows, in one program, two and four: 4.4, 3.4 and 3.9.
    each = block_rows(triton.cdiv(rows, 2) if rows <= MOST_SUMMED else rows)
    output = new_partials(state, rows, 2 * splits, hidden)
    args, constants = source_arguments(
        embed, embed_scale, state, token_ids, row_index, parts, ids_out, logprobs_out
    )
    args |= {"weight": weight, "weight_stride": weight.stride(0), "output": output, "num_rows": rows}
    constants |= {
        "N": hidden, "K": backbone, "HALF_SPLITS": splits,
        "BLOCKS": triton.cdiv(triton.cdiv(backbone, block_k), splits), "BLOCK_M": each,
        "BLOCK_N": block_n, "BLOCK_K": block_k, "EARLY": early,
    }
    grid = (triton.cdiv(rows, each), hidden // block_n, 2 * splits)
    return Launch(pre_round, grid, args, constants, num_warps=warps, early=early, in_round=True), Pending(output)


def source_arguments(
    embed: Tensor, embed_scale: float, state: Tensor, token_ids: Tensor | None, row_index: Tensor | None,
    parts: dict[str, Tensor] | None, ids_out: Tensor | None, logprobs_out: Tensor | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and constants that say which rows pre_project multiplies."""
    num_parts = 0 if parts is None else parts["part_values"].size(1)
    given = dict.fromkeys(("part_values", "part_orders", "part_max", "part_sum")) if parts is None else parts
    args = {
        **given, "token_ids": token_ids, "ids_stride": 0 if token_ids is None else token_ids.stride(0),
        "row_index": row_index, "index_stride": 0 if row_index is None else row_index.stride(0),
        "ids_out": ids_out, "logprobs_out": logprobs_out, "out_stride": 0 if ids_out is None else ids_out.stride(0),
        "embed": embed, "embed_stride": embed.stride(0), "embed_scale": float(embed_scale),
        "state": state, "state_stride": state.stride(1) if state.size(0) == 1 else state.stride(0) // state.size(1),
        "rows_each": 1 if token_ids is None else token_ids.size(1), "prev_rows": state.size(1),
    }
    constants = {
        "VOCAB": embed.size(0), "PARTS": num_parts, "BLOCK_P": triton.next_power_of_2(max(1, num_parts)),
    }
    return args, constants


def norm_linear(
    x: Pending, x_out: Tensor | None, norm: Tensor, eps: float, weight: Tensor, output: Tensor, *,
    normed: Tensor | None = None, centroids: Tensor | None = None, scores: Tensor | None = None,
    group_max: Tensor | None = None, early: bool = False
) -> Launch:
    """rmsnorm(x) * norm @ weight.T into `output`, and x into `x_out`; with `centroids` their scores beside it."""
    args, constants = x.arguments()
    columns, others = weight.size(0), 0 if centroids is None else centroids.size(0)
    block_n, warps = tile(columns, others)
    args |= {
        "x_out": x_out, "norm": norm, "weight": weight, "weight_stride": weight.stride(0),
        "output": output, "normed": normed, "eps": float(eps), "other_weight": centroids,
        "other_stride": None if centroids is None else centroids.stride(0), "scores": scores, "group_max": group_max,
    }
    constants |= {"N": columns, "BLOCK_N": block_n, "OTHERS": others, "GROUP": GROUP, "EARLY": early}
    if x.partials is not None:
        constants["BLOCK_M"] = 1  # adding a row's splits takes longer than another look at the weights
    grid = (triton.cdiv(x.shape[0], constants["BLOCK_M"]), (columns + others) // block_n)
    return Launch(norm_linear_round, grid, args, constants, num_warps=warps, early=early, in_round=True)


def geglu(
    x: Pending, x_out: Tensor | None, norm: Tensor, eps: float, gate_up: Tensor, output: Tensor, *, early: bool = False
) -> Launch:
    """norm_geglu of x into `output` [rows, intermediate], and x into `x_out`."""
    args, constants = x.arguments()
    columns = output.size(1)
    block_n, warps = tile(columns)
    args |= {
        "x_out": x_out, "norm": norm, "gate_up": gate_up, "gate_up_stride": gate_up.stride(0), "output": output,
        "eps": float(eps),
    }
    constants |= {"N": columns, "BLOCK_N": block_n, "EARLY": early}
    grid = (_row_blocks(x.shape[0]), columns // block_n)
    return Launch(geglu_round, grid, args, constants, num_warps=warps, early=early, in_round=True)


def linear(x: Tensor, weight: Tensor, *, early: bool = False) -> tuple[Launch, Pending]:
    """x [rows, K] @ weight.T, its splits pending."""
    rows, inner = x.shape
    columns = weight.size(0)
    block_n, warps = tile(columns)
    block_k = next(size for size in (SPLIT_K, 64, 16) if inner % size == 0)
    output = new_partials(x, rows, inner // block_k, columns)
    args = {"x": x, "weight": weight, "weight_stride": weight.stride(0), "output": output, "num_rows": rows}
    constants = {
        "N": columns, "K": inner, "BLOCK_M": block_rows(rows), "BLOCK_N": block_n, "BLOCK_K": block_k, "EARLY": early
    }
    grid = (_row_blocks(rows), columns // block_n, inner // block_k)
    return Launch(linear_round, grid, args, constants, num_warps=warps, early=early, in_round=True), Pending(output)


def finish(
    parts: dict[str, Tensor], seed_ids: Tensor, roots: Tensor | None, cand_ids: Tensor, logprobs: Tensor,
    cand_scores: Tensor, draft_ids: Tensor, positions: Tensor | None, *, early: bool = False
) -> Launch:
    """The last step's candidates into cand_ids and logprobs [rows, steps], and the chain's draft."""
    rows, steps = cand_ids.shape
    num_parts = parts["part_values"].size(1)
    args = {
        **parts, "seed_ids": seed_ids, "seed_stride": seed_ids.stride(0), "roots": roots,
        "roots_stride": 0 if roots is None else roots.stride(0), "cand_ids": cand_ids, "logprobs": logprobs,
        "cand_scores": cand_scores, "draft_ids": draft_ids, "positions": positions,
    }
    constants = {
        "STEPS": steps, "NODES": draft_ids.size(1), "PARTS": num_parts,
        "BLOCK_P": triton.next_power_of_2(num_parts), "EARLY": early,
    }
    return Launch(finish_round, (rows,), args, constants, num_warps=1, early=early, in_round=True)


def block_rows(rows: int) -> int:
    return min(MOST_ROWS, triton.next_power_of_2(max(1, rows)))


def tile(*columns: int) -> tuple[int, int]:
    """(columns of a program, warps), eight columns a warp.

    Microseconds of an E4B step at batch 1 on an H200: 77 so, 82 with one warp a program and four times as many
    programs, though each kernel alone took less.
    """
    return (32, 4) if all(n % 32 == 0 for n in columns) else (16, 2)


def _row_blocks(rows: int) -> int:
    return triton.cdiv(rows, block_rows(rows))


def new_partials(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
