"""Tile sizes of the skinny GEMMs: pure functions of K, N and the dtype, so that a row's bits never follow the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STAGE_BYTES = 80 * 1024  # of shared memory for a program's stages: with the rest less than the 99 KB of sm_120


@dataclass(frozen=True)
class GemmConfig:
    """How [rows, K] @ [N, K].T is cut up."""

    block_n: int  # columns of the result a program has
    slab_k: int
    num_stages: int = 1  # of the loop over a program's blocks of K, where memory allows
    slabs: int = 4  # of a block of K, one a warp
    splits: int = 1  # programs that share a column's sum
    blocks_per_split: int = 0
    block_ms: tuple[int, ...] = (16, 32, 64)  # to choose from

    @property
    def block_k(self) -> int:
        return self.slabs * self.slab_k

    def constants(self, num_rows: int) -> dict[str, Any]:
        return {"BLOCK_M": self.block_m(num_rows), "BLOCK_N": self.block_n, "SLABS": self.slabs, "SLAB_K": self.slab_k}

    def block_m(self, num_rows: int) -> int:
        """Rows that share a program's weights. It follows the batch, but no row's result follows it."""
        return next((size for size in self.block_ms if size >= num_rows), self.block_ms[-1])

    def stages(self, num_rows: int, itemsize: int, weight_tiles: int = 1) -> int:
        rows = self.block_m(num_rows) + weight_tiles * self.block_n
        return max(1, min(self.num_stages, STAGE_BYTES // (rows * self.block_k * itemsize)))


def whole_config(inner: int, itemsize: int, busy: bool = False) -> GemmConfig:
    """One program sums over all of K: norm_linear, and norm_geglu and post_project, which do more beside (`busy`).

    Microseconds on an H200 with a cold L2, at 1 and 64 rows: E4B (K 256) norm_linear 2.3 and 3.6, norm_geglu 4.1 and
    6.0, post_project 3.5 and 5.4.
    """
    if itemsize == 4:
        return GemmConfig(16, 16, 2, block_ms=(16, 32))
    if inner <= 256:  # E2B, E4B: latency counts, so many small programs, each with all of its loads in flight at once
        slabs = 2 if busy else 4
        return GemmConfig(16, max(16, power_of_2(inner) // slabs), slabs=slabs, block_ms=(16,))
    return GemmConfig(32, 64, 3, block_ms=(16,))


def split_config(num_columns: int, inner: int, itemsize: int, parts: int = 1, gather: bool = False) -> GemmConfig:
    """Programs share a column's sum over `parts` times `inner`: linear_norm_add and pre_project (`gather`).

    No split crosses from one part to the next. A program that gathers its rows needs all of its loads in flight at once
    where the weights are small, and more registers a row.
    """
    small = num_columns <= 512
    block_n = 16 if small else 32
    slab_k = min((128 if gather else 64) if small else (32 if gather else 64),
                 max(16, power_of_2(inner) // (4 if gather else 32)))
    if itemsize == 4:
        slab_k = 16
    slabs = 4
    blocks = -(-inner // (slabs * slab_k))
    tiles = -(-num_columns // block_n) * parts
    wanted = 120  # programs: about one for each of 132 SMs
    splits = next((d for d in range(1, blocks + 1) if blocks % d == 0 and d * tiles >= wanted), blocks)
    block_ms: tuple[int, ...] = (16,)
    if itemsize == 4:
        block_ms = (16, 32)
    elif gather:
        block_ms = (16, 32) if small else (16, 64)  # more rows spill registers
    return GemmConfig(block_n, slab_k, 6 if gather else 4, slabs, splits * parts, blocks // splits, block_ms)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
