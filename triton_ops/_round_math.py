"""What the private kernels of a round share: sums and norms whose bits follow neither tile nor number of rows."""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = tl.constexpr(2.0**40)  # of a fixed-point sum of squares


@triton.jit
def rms_scale(x, eps, K: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of the rows of x [M, K] in fp32.

    Squares are taken relative to a power of two near the row's largest value and added as integers: the same bits in
    whatever order, so that a kernel may lay its rows out as it likes.
    """
    top = tl.max(tl.abs(x), 1)  # [M]
    exponent = top.to(tl.int32, bitcast=True) & 0x7F800000
    unit = exponent.to(tl.float32, bitcast=True)  # unit <= top < 2 unit
    inverse = (0x7F000000 - tl.minimum(exponent, 0x7F000000)).to(tl.float32, bitcast=True)  # 2^127 is 0x7F000000
    relative = x * inverse[:, None]
    total = tl.sum((relative * relative * UNITS).to(tl.int64), 1).to(tl.float32) * (1.0 / UNITS)
    mean = total * (1.0 / K) * unit * unit
    mean = tl.where(top == float("inf"), top, mean)  # a row with an infinity becomes zeros and NaN, as by the formula
    return tl.rsqrt(mean + eps)


@triton.jit
def rms_scale_of_program(x, eps, K: tl.constexpr):
    """The same in fewer steps, for kernels whose programs have one row: its bits follow how a program lays it out."""
    return tl.rsqrt(tl.sum(x * x, 1) * (1.0 / K) + eps)


@triton.jit
def sum_splits(partials, rows, row_mask, k, SPLITS: tl.constexpr, K: tl.constexpr):
    """The sum of the splits of rows [M, K], in their order, from partials [rows, SPLITS, K] in fp32."""
    at = partials + rows.to(tl.int64)[:, None] * (SPLITS * K) + k[None, :]
    total = tl.load(at, mask=row_mask[:, None], other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * K, mask=row_mask[:, None], other=0.0)
    return total


@triton.jit
def take_in(partials, residual, post_norm, scale, eps, rows, row_mask, k, SPLITS: tl.constexpr, K: tl.constexpr,
            dtype: tl.constexpr, SHORT: tl.constexpr = False):
    """x [M, K] in fp32, rounded to `dtype`: the projection whose splits are in `partials`, or with `post_norm` [K] what
    linear_norm_add makes of it, (residual + rmsnorm(projection) * post_norm) * scale; without splits, `residual`.
    SHORT: by rms_scale_of_program."""
    if SPLITS > 0:
        x = sum_splits(partials, rows, row_mask, k, SPLITS, K)
    if residual is not None:
        at = residual + rows.to(tl.int64)[:, None] * K + k[None, :]
        before = tl.load(at, mask=row_mask[:, None], other=0.0).to(tl.float32)
        if SPLITS == 0:
            x = before
        else:
            factor = rms_scale_of_program(x, eps, K) if SHORT else rms_scale(x, eps, K)
            x = before + x * factor[:, None] * post_norm[None, :]
    if scale is not None:
        x *= scale
    return x.to(dtype).to(tl.float32)
