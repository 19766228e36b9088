"""What a launch that starts early brings into the L2 before it waits: its own weights, and those of a later kernel."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ._early import prefetch

AHEAD_BYTES = 16 << 20  # of a later kernel's weights at most: a third of an H200's L2, whose halves may hold copies
PIECE_BYTES = tl.constexpr(2048)  # of one request


def can_prefetch(weight: Tensor) -> bool:
    """Whether all rows start at multiples of 16 bytes and are as long, as a bulk prefetch wants it."""
    itemsize = weight.element_size()
    sizes = (weight.data_ptr(), weight.stride(0) * itemsize, weight.size(1) * itemsize)
    return weight.stride(1) == 1 and all(size % 16 == 0 for size in sizes)


def ahead_pieces(num_rows: int, row_bytes: int) -> tuple[int, int]:
    """(pieces a row, pieces in all) that are prefetched of a matrix: from its first row on, AHEAD_BYTES at most.

    >>> ahead_pieces(8192, 2048), ahead_pieces(1024, 5376), ahead_pieces(262144, 2048)
    ((1, 8192), (3, 3072), (1, 8192))
    """
    per_row = -(-row_bytes // PIECE_BYTES.value)
    return per_row, min(num_rows * per_row, AHEAD_BYTES // PIECE_BYTES.value)


def ahead_arguments(ahead: Tensor | None, early: bool, programs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments, constants) of prefetch_ahead in a launch of so many programs; it does nothing unless `early`."""
    if ahead is None or not early or ahead.numel() == 0 or not can_prefetch(ahead):
        return dict.fromkeys(("ahead", "ahead_stride", "ahead_pieces", "ahead_share")), {"AHEAD_ROW_BYTES": 0}
    row_bytes = ahead.size(1) * ahead.element_size()
    _, pieces = ahead_pieces(ahead.size(0), row_bytes)
    arguments = {
        "ahead": ahead, "ahead_stride": ahead.stride(0), "ahead_pieces": pieces,
        "ahead_share": -(-pieces // max(1, programs)),
    }
    return arguments, {"AHEAD_ROW_BYTES": row_bytes}


@triton.jit
def prefetch_tile(weight, weight_stride, first_n, last_n, first_k, columns, BLOCK_N: tl.constexpr,
                  THREADS: tl.constexpr, EARLY: tl.constexpr):
    """Ask for `columns` columns from `first_k` on of BLOCK_N rows from `first_n` on, none from `last_n` on."""
    if EARLY:
        PIECES: tl.constexpr = max(1, THREADS // BLOCK_N)  # of a row: one request a thread
        i = tl.arange(0, BLOCK_N * PIECES)
        n = first_n + i // PIECES
        width = (columns + PIECES * 8 - 1) // (PIECES * 8) * 8  # columns of a request: 16-bit weights
        begin = i % PIECES * width
        size = tl.where(n < last_n, tl.minimum(tl.maximum(columns - begin, 0), width), 0)
        pointers = weight + n.to(tl.int64) * weight_stride + (first_k + begin)
        prefetch(pointers, size * 2, EARLY)


@triton.jit
def prefetch_ahead(ahead, ahead_stride, ahead_pieces, ahead_share, AHEAD_ROW_BYTES: tl.constexpr, THREADS: tl.constexpr,
                   EARLY: tl.constexpr):
    """Ask for this program's even share of the pieces of `ahead`."""
    if EARLY and ahead is not None:
        PER_ROW: tl.constexpr = (AHEAD_ROW_BYTES + PIECE_BYTES - 1) // PIECE_BYTES
        ITEM: tl.constexpr = ahead.dtype.element_ty.primitive_bitwidth // 8
        program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
        last = tl.minimum((program + 1) * ahead_share, ahead_pieces)
        for start in range(program * ahead_share, last, THREADS):
            piece = start + tl.arange(0, THREADS)
            begin = piece % PER_ROW * PIECE_BYTES  # bytes
            pointers = ahead + (piece // PER_ROW).to(tl.int64) * ahead_stride + begin // ITEM
            prefetch(pointers, tl.where(piece < last, tl.minimum(AHEAD_ROW_BYTES - begin, PIECE_BYTES), 0), EARLY)
