"""Gumbel noise as mtp_kernels/reference/_philox.py documents it: the same random words, rounded alike."""

from __future__ import annotations

import triton
import triton.language as tl

BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)  # the largest fp32 below 1


@triton.jit
def gumbel_noise(seed, offset, ids):
    """Standard Gumbel noise of each (seed, offset, id), int64, broadcast against each other; always finite."""
    ids, offset = ids + (offset - offset), offset + (ids - ids)
    word, _, _, _ = tl.philox(seed, low(ids), high(ids), low(offset), high(offset))
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, BELOW_ONE)
    return -tl.log(-log1p_negative(u))


@triton.jit
def low(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high(x):
    return ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def log1p_negative(u):
    """log1p(-u) for u in (0, 1), to fp32: the series for small u, where 1 - u would round away what is drawn from."""
    series = 1 / 12
    for i in tl.static_range(1, 12):
        series = series * u + 1.0 / (12 - i)
    return tl.where(u < 0.125, -u * series, tl.log(1.0 - u))
