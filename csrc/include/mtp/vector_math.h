// exp, log, log1p and tanh of vectors, to a unit or two in the last place. For csrc/cpu/kernels alone, like simd.h.
#pragma once

#include "mtp/simd.h"

namespace mtp::MTP_ISA::vector_math {

inline Floats infinity() { return broadcast(__builtin_inff()); }

// NaN becomes -inf, everything else stays.
inline Floats no_nan(Floats x) { return select(x == x, x, -infinity()); }

inline float max_of_lanes(Floats values) {
  float largest = values[0];
  for (int i = 1; i < kLanes; ++i) {
    largest = values[i] > largest ? values[i] : largest;
  }
  return largest;
}

// exp(x) for x <= 0, no NaN; results below 2^-126 become 0. x = n ln 2 + r, |r| <= ln 2 / 2, where seven terms of the
// series are exact to 2^-27.
inline Floats exp_negative(Floats x) {
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to an integer
  const Floats clamped = select(x < -88.0f, broadcast(-88.0f), x);
  const Floats shifted = clamped * 1.44269504f + shifter;
  const Floats n = shifted - shifter;
  const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first one short
  Floats y = r * (1.0f / 5040) + (1.0f / 720);
  y = y * r + (1.0f / 120);
  y = y * r + (1.0f / 24);
  y = y * r + (1.0f / 6);
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const Words exponent = ((Words)shifted - as_word(12582912.0f)) << 23;
  const Floats scaled = (Floats)((Words)y + exponent);
  return select(x < -87.0f, Floats{}, scaled);
}

// log(x) for normal x > 0: x = 2^e m with m from sqrt(1/2) to sqrt(2), and log(m) = 2 atanh((m - 1) / (m + 1)).
inline Floats log(Floats x) {
  const Words offset = broadcast_word(0x3f3504f3u);  // sqrt(1/2)
  const Words above = (Words)x - offset;
  const Floats e = __builtin_convertvector((Ints)above >> 23, Floats);
  const Floats f = (Floats)((above & 0x7fffffu) + offset) - 1.0f;
  const Floats s = f / (f + 2.0f);
  const Floats z = s * s;
  const Floats tail = (((z * (2.0f / 9) + (2.0f / 7)) * z + (2.0f / 5)) * z + (2.0f / 3)) * z;
  // 2 s = f - s f, so that the large part of the result is f, which is exact.
  const Floats rest = s * (tail - f) + e * -2.12194440e-4f;
  return e * 0.693359375f + (f + rest);
}

// log(1 + x) for -1 < x <= 0: what rounding takes from 1 + x is put back.
inline Floats log1p(Floats x) {
  const Floats w = 1.0f + x;
  return log(w) + (x - (w - 1.0f)) / w;
}

inline Floats tanh(Floats x) {
  const Floats size = select(x < 0.0f, -x, x);
  const Floats e = exp_negative(-2.0f * size);
  const Floats large = select(x < 0.0f, e - 1.0f, 1.0f - e) / (1.0f + e);
  const Floats z = x * x;
  Floats series = z * (-1382.0f / 155925) + (62.0f / 2835);
  series = series * z + (-17.0f / 315);
  series = series * z + (2.0f / 15);
  series = series * z + (-1.0f / 3);
  // NaN is neither, and goes through the series.
  return select(size >= 0.3f, large, x + x * z * series);
}

}  // namespace mtp::MTP_ISA::vector_math
