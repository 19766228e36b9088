"""Device functions of draft_attention: sine and cosine of large angles, tanh, fp8 decoded by hand."""

from __future__ import annotations

import triton
import triton.language as tl

TWO_OVER_PI = tl.constexpr(0x28BE60DB9391054A)  # 2 / pi in units of 2^-62, rounded down
UNIT = tl.constexpr(1.5707963267948966 * 2.0**-62)  # radians in 2^-62 quarter turns
HALF_TURN = tl.constexpr(1 << 61)  # half of a quarter turn, for rounding


@triton.jit
def sincos(x):
    """Sine and cosine of fp32 angles, to a few 1e-8 for |x| up to 2^32; Triton's own are approximations for small ones.

    x is mantissa * 2^exponent; its quarter turns, modulo 4, are one 64-bit integer product that may wrap, exact but for
    the bits of 2 / pi below 2^-62. What is left lies within an eighth of a turn: Taylor series suffice.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) - 150
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    factor = tl.full(x.shape, TWO_OVER_PI, tl.int64) >> tl.minimum(tl.maximum(-exponent, 0), 63).to(tl.int64)
    turns = mantissa * (factor << tl.minimum(tl.maximum(exponent, 0), 38).to(tl.int64))
    quadrant = (turns + HALF_TURN) >> 62
    r = (turns - (quadrant << 62)).to(tl.float32) * UNIT
    z = r * r
    s = r + r * z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880))))
    c = 1.0 + z * (-0.5 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 - z * (1 / 3628800)))))
    odd = (quadrant & 1) != 0
    sine, cosine = tl.where(odd, c, s), tl.where(odd, s, c)
    sine = tl.where(((quadrant & 2) != 0) != (bits < 0), -sine, sine)
    cosine = tl.where(((quadrant + 1) & 2) != 0, -cosine, cosine)
    return sine, cosine


@triton.jit
def tanh(x):
    """A Pade quotient near 0, where 1 - 2 / (exp + 1) would cancel; beyond, an exp that may overflow to 1 - 0."""
    a = tl.abs(x)
    z = tl.minimum(a * a, 1.0)
    small = x * (945.0 + z * (105.0 + z)) / (945.0 + z * (420.0 + z * 15.0))
    large = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
    return tl.where(a < 0.5, small, tl.where(x < 0, -large, large))


@triton.jit
def decode_fp8(bits, dtype: tl.constexpr):
    """float8_e4m3fn, given as uint8, in `dtype`: exact, subnormals and NaN too, on GPUs that cannot convert it.

    Its exponent and mantissa, in place in an fp32, are the value times 2^-120.
    """
    b = bits.to(tl.int32)
    y = (((b & 0x7F) << 20) | ((b & 0x80) << 24)).to(tl.float32, bitcast=True) * (2.0**120)
    return tl.where((b & 0x7F) == 0x7F, float("nan"), y).to(dtype)
