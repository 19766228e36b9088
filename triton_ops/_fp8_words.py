"""A weight in fp8 (e4m3) as words of two elements, multiplied in fp16.

e4m3 is exact in fp16, and its conversion one instruction for two. bf16 takes a second one for every element, from a
unit that does 16 of them a clock and multiprocessor: as much as the memory sends, with nothing left for exp.

A tile of words is laid out as any 16-bit operand, so that it goes past the registers into shared memory and from there
to the product, four elements a register. It becomes fp16 in another order: of every GROUP columns the even ones, then
the odd ones. `spread` brings what the weight multiplies into the same order, which no tile's width changes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._attention_math import decode_fp8
from ._launch import Launch
from ._rows import num_rows, row_arguments, row_offset

GROUP = tl.constexpr(32)  # columns: two matrix instructions


def has_words(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` has 16 bits, and every row of the weight whole words of them."""
    if weight.element_size() != 1 or x.element_size() != 2:
        return False
    return all(n % 2 == 0 for n in (weight.size(1), weight.stride(0), weight.storage_offset(), weight.data_ptr()))


def spread(x: Tensor) -> tuple[Launch, Tensor, Tensor | None]:
    """(launch, rows in fp16 [rows, columns, filled up to whole groups], what restores their products [rows] or None).

    Rows of bf16 are scaled by a power of two, each by its own, until their largest finite magnitude lies in
    [2^14, 2^15). Down to 2^-31 of it nothing is lost, below at most 2^-39 of it: less than a sum in fp32 loses.
    NaN and infinities stay what they are.
    """
    rows, columns = num_rows(x), x.size(-1)
    padded = triton.cdiv(columns, GROUP.value) * GROUP.value
    spread_rows = x.new_empty((rows, padded), dtype=torch.float16)
    scale = None if x.dtype == torch.float16 else x.new_empty(rows, dtype=torch.float32)
    args: dict[str, Any] = {"x": x, **row_arguments("x", x), "spread_rows": spread_rows, "scale": scale}
    constants = {"COLUMNS": columns, "PADDED": padded, "BLOCK": triton.next_power_of_2(padded)}
    return Launch(spread_kernel, (rows,), args, constants), spread_rows, scale


@triton.jit(do_not_specialize=["x_size1", "x_size2"])
def spread_kernel(
    x, x_size1, x_size2, x_stride0, x_stride1, x_stride2, spread_rows, scale, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """A program a row."""
    row = tl.program_id(0)
    x_row = x + row_offset(row, x_size1, x_size2, x_stride0, x_stride1, x_stride2)
    to = tl.arange(0, BLOCK)
    column = to // GROUP * GROUP + to % (GROUP // 2) * 2 + to % GROUP // (GROUP // 2)
    values = tl.load(x_row + column, mask=column < COLUMNS, other=0.0)
    if scale is not None:
        values = values.to(tl.float32)
        down, up = powers(values)
        values = values * down
        tl.store(scale + row, up)
    tl.store(spread_rows + row.to(tl.int64) * PADDED + to, values.to(tl.float16), mask=to < PADDED)


@triton.jit
def powers(values):
    """(2^n, 2^-n), n at most 126: the largest finite magnitude of fp32 `values` times 2^n lies in [2^14, 2^15)."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.maximum(tl.max(tl.where(bits < 0x7F800000, bits, 0), 0) >> 23, 15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_words(words, DECODE: tl.constexpr):
    """int16 words [rows, n] as fp16 [rows, 2 * n]: of every group the lower bytes, then the upper ones."""
    if DECODE:
        even, odd = decode_fp8(words & 0xFF, tl.float16), decode_fp8((words >> 8) & 0xFF, tl.float16)
    else:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 even, odd;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {even, odd}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # of two words at a time
    HALF: tl.constexpr = GROUP // 2
    columns = tl.join(even, odd).reshape(words.shape[0], words.shape[1] // HALF, HALF, 2)
    return columns.permute(0, 1, 3, 2).reshape(words.shape[0], 2 * words.shape[1])
