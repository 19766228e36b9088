"""Tile sizes of the wide GEMMs: pure functions of N, K and the dtype, so that a row's bits never follow the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._launch import capability

LEAST_SHARED = 98 * 1024  # bytes a program may have anywhere: within the 99 KB of sm_120
MOST_SHARED = 200 * 1024  # on sm_80, sm_90 and sm_100, of which the first has 163 KB
PROGRAMS = 128  # about as many as an H200 has SMs (132), each with an equal share of the weights
FEWEST_PROGRAMS = 80  # that can still draw all of the bandwidth
LEAST_WIDE_K = 512  # fewer columns do not fill the stages


@dataclass(frozen=True)
class WideConfig:
    """How [rows, K] @ [N, K].T is cut up: a program has `block_n` rows of the weights and `blocks_per_split` of K."""

    block_n: int  # 64 rows for each group of four warps make a Hopper wgmma; fewer, an mma
    block_k: int = 64
    num_warps: int = 4
    max_stages: int = 8  # of the loop over K, where memory allows
    shared: int = 97 * 1024  # bytes a program wants, so that two share an SM of sm_90; it gets what the GPU has
    splits: int = 1  # programs that share a column's sum
    blocks_per_split: int = 0

    def rows(self, num_rows: int) -> int:
        """Rows that share a program's weights: follows the batch, but no row's result follows it.

        16 is the fewest for which Triton makes a wgmma or a tcgen05.mma; with 8 it would change to mma.
        """
        return next((size for size in (16, 32, 64) if size >= num_rows), 64)

    def stages(self, num_rows: int, most_shared: int, weight_tiles: int = 1) -> int:
        rows = self.rows(num_rows)
        stage = 2 * self.block_k * (weight_tiles * self.block_n + rows)  # bytes
        return max(2, min(self.max_stages, (min(self.shared, most_shared) - 1024) // stage))

    def constants(self, num_rows: int) -> dict[str, Any]:
        return {"ROWS": self.rows(num_rows), "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}


def is_wide(inner: int, itemsize: int) -> bool:
    """Whether a product over `inner` takes the wide path, where one program sums over all of it."""
    return itemsize == 2 and inner >= LEAST_WIDE_K


def is_wide_split(num_columns: int, inner: int, itemsize: int) -> bool:
    """Whether a product whose sums are split takes the wide path."""
    return itemsize == 2 and inner >= LEAST_WIDE_K and num_columns > 512


def shared_bytes(device: torch.device) -> int:
    """What a program may have on a GPU; on no GPU, what fits every one."""
    return {80: 160 * 1024, 90: MOST_SHARED, 100: MOST_SHARED}.get(capability(device), LEAST_SHARED)


def wide_config(num_columns: int, gated: bool = False, normed: bool = False) -> WideConfig:
    """One program sums over all of K. `gated` is norm_geglu, `normed` post_project, which scales x first.

    Microseconds on an H200 with a cold L2 at 1 and 64 rows of 31B, in brackets with the tiles of _gemm_config.py, whose
    programs read the weights again for every 16 rows: norm_linear (N 8192) 8.1 and 10.3 (10.0 and 27.5), (N 16384) 11.8
    and 14.2 (19.0 and 51.0); norm_geglu 11.6 and 14.8 (17.1 and 43.1); post_project 8.4 and 15.0 (9.4 and 21.1). Of
    other tiles: norm_linear (N 8192) with 64 columns of K a stage 9.7 and 11.8, with 128 rows of weights 10.6 and 13.9;
    norm_geglu with 64 rows of each matrix 12.5 and 15.2; post_project with 64 rows 11.2 and 16.5.
    """
    if gated:
        return WideConfig(32, 64, max_stages=4)  # of each of two matrices: 64 rows
    if num_columns < FEWEST_PROGRAMS * 64:
        return WideConfig(32)
    if normed:
        return WideConfig(128, 128, num_warps=8, shared=MOST_SHARED)
    return WideConfig(64, 128, shared=112 * 1024)


def wide_split_config(num_columns: int, inner: int, parts: int = 1) -> WideConfig:
    """Programs share a column's sum over `parts` times `inner`; no split crosses from one part to the next.

    Measured as above, linear_norm_add (31B, K 8192) 8.8 and 10.9 (10.4 and 16.7), (K 16384) 12.6 and 16.3 (15.1 and
    24.7), pre_project 10.5 and 14.8 (13.4 and 26.2); twice as many programs 9.8 and 11.5, 13.9 and 15.9, 10.3 and 13.8.
    """
    block_n, block_k = 64, 64
    tiles = -(-num_columns // block_n) * parts
    blocks = -(-inner // block_k)
    per_split = -(-blocks // max(1, round(PROGRAMS / tiles)))
    splits = -(-blocks // per_split)
    return WideConfig(block_n, block_k, splits=splits * parts, blocks_per_split=per_split)
