"""Tile sizes of the wide GEMMs: pure functions of N, K and the dtype, so that a row's bits never follow the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARED_BYTES = 96 * 1024  # a program: within sm_120's 99 KB, and two of one kernel or of two share an SM of sm_90
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
    splits: int = 1  # programs that share a column's sum
    blocks_per_split: int = 0

    def rows(self, num_rows: int) -> int:
        """Rows that share a program's weights: follows the batch, but no row's result follows it.

        16 is the fewest for which Triton makes a wgmma or a tcgen05.mma; with 8 it would change to mma.
        """
        return next((size for size in (16, 32, 64) if size >= num_rows), 64)

    def stages(self, num_rows: int, weight_tiles: int = 1) -> int:
        rows = self.rows(num_rows)
        stage = 2 * self.block_k * (weight_tiles * self.block_n + rows)  # bytes
        return max(2, min(self.max_stages, (SHARED_BYTES - 1024) // stage))

    def constants(self, num_rows: int) -> dict[str, Any]:
        return {"ROWS": self.rows(num_rows), "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}


def is_wide(inner: int, itemsize: int) -> bool:
    """Whether a product over `inner` takes the wide path, where one program sums over all of it."""
    return itemsize == 2 and inner >= LEAST_WIDE_K


def is_wide_split(num_columns: int, inner: int, itemsize: int) -> bool:
    """Whether a product whose sums are split takes the wide path."""
    return itemsize == 2 and inner >= LEAST_WIDE_K and num_columns > 512


def wide_config(num_columns: int, inner: int) -> WideConfig:
    """One program sums over all of K: the largest tiles of which there are enough.

    The tiles of _gemm_config.py took, in microseconds on an H200 with a cold L2 at 1 and 64 rows of 31B: norm_linear
    (N 8192) 10.0 and 28.7, norm_geglu 16.6 and 41.8, post_project 9.7 and 21.1; every 16 rows read the weights again.
    """
    block_n = next((size for size in (128, 64) if num_columns >= FEWEST_PROGRAMS * size), 32)
    return WideConfig(block_n, num_warps=8 if block_n == 128 else 4)


def wide_split_config(num_columns: int, inner: int, parts: int = 1) -> WideConfig:
    """Programs share a column's sum over `parts` times `inner`; no split crosses from one part to the next.

    The tiles of _gemm_config.py took 10.5 and 16.7 us for linear_norm_add (31B down, K 8192), measured as above.
    """
    block_n, block_k = 64, 64
    tiles = -(-num_columns // block_n) * parts
    blocks = -(-inner // block_k)
    per_split = -(-blocks // max(1, round(PROGRAMS / tiles)))
    splits = -(-blocks // per_split)
    return WideConfig(block_n, block_k, splits=splits * parts, blocks_per_split=per_split)
