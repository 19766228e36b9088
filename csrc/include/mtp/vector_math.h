// exp, log, log1p, tanh, sine and cosine of vectors, to a unit or two in the last place. For csrc/cpu/kernels alone,
// like simd.h.
#pragma once

#include "mtp/simd.h"

namespace mtp::MTP_ISA::vector_math {

inline Floats infinity() { return broadcast(__builtin_inff()); }

// NaN becomes -inf, everything else stays.
inline Floats no_nan(Floats x) { return select(x == x, x, -infinity()); }

inline float max_of_lanes(Floats values) {
#if MTP_LANES == 16
  values =
      maximum(values, __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  values =
      maximum(values, __builtin_shufflevector(values, values, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
#elif MTP_LANES == 8
  values = maximum(values, __builtin_shufflevector(values, values, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
  float largest = values[0];
  for (int i = 1; i < 4; ++i) {
    largest = values[i] > largest ? values[i] : largest;
  }
  return largest;
}

// e^x within 2 units in the last place; 0 below -87 (as good as 0 beside 1), infinity above 88, NaN for NaN.
inline Floats exp(Floats x) {
  const Floats low = broadcast(-87.0f);
  const Floats high = broadcast(88.0f);
  const Floats inside = select(x < low, low, select(x > high, high, x));
  // x = n ln 2 + rest: adding 1.5 * 2^23 rounds to an integer, which then sits in the lowest bits.
  const Floats shifter = broadcast(12582912.0f);
  const Floats shifted = inside * 1.44269504f + shifter;
  const Floats n = shifted - shifter;
  const Floats rest = (inside - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first one short
  Floats series = rest * (1.0f / 5040) + (1.0f / 720);
  series = series * rest + (1.0f / 120);
  series = series * rest + (1.0f / 24);
  series = series * rest + (1.0f / 6);
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const Words exponent = ((Words)shifted - as_word(12582912.0f) + 127u) << 23;
  const Floats value = series * (Floats)exponent;
  return select(x > high, infinity(), select(x < low, Floats{}, value));
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
  const Floats e = exp(-2.0f * size);
  const Floats large = select(x < 0.0f, e - 1.0f, 1.0f - e) / (1.0f + e);
  const Floats z = x * x;
  Floats series = z * (-1382.0f / 155925) + (62.0f / 2835);
  series = series * z + (-17.0f / 315);
  series = series * z + (2.0f / 15);
  series = series * z + (-1.0f / 3);
  // NaN is neither, and goes through the series.
  return select(size >= 0.3f, large, x + x * z * series);
}

typedef double Doubles __attribute__((vector_size(4 * MTP_LANES)));
typedef int64_t Longs __attribute__((vector_size(4 * MTP_LANES)));
typedef float HalfFloats __attribute__((vector_size(2 * MTP_LANES)));

// Sine and cosine of kLanes / 2 fp32 angles of any size, computed in fp64.
inline void sine_cosine(const float* angles, float* sine, float* cosine) {
  constexpr int kCount = kLanes / 2;
  HalfFloats narrow;
  __builtin_memcpy(&narrow, angles, sizeof narrow);
  const Doubles x = __builtin_convertvector(narrow, Doubles);
  bool small = true;
  for (int i = 0; i < kCount; ++i) {
    small = small && __builtin_fabsf(angles[i]) < 1.0e6f;
  }
  if (!small) {  // the reduction below would lose bits; also infinity and NaN
    for (int i = 0; i < kCount; ++i) {
      sine[i] = static_cast<float>(__builtin_sin(x[i]));
      cosine[i] = static_cast<float>(__builtin_cos(x[i]));
    }
    return;
  }
  const Doubles magic = Doubles{} + 6755399441055744.0;  // 1.5 * 2^52
  const Doubles shifted = x * 0.63661977236758134 + magic;
  const Doubles n = shifted - magic;
  const Doubles r = (x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34;  // pi / 2, of which n < 2^20 are exact
  const Doubles r2 = r * r;
  Doubles s = Doubles{} + 1.0 / 6227020800;  // Taylor to 13 and 14 places, 2e-14 at pi / 4
  s = s * r2 - 1.0 / 39916800;
  s = s * r2 + 1.0 / 362880;
  s = s * r2 - 1.0 / 5040;
  s = s * r2 + 1.0 / 120;
  s = s * r2 - 1.0 / 6;
  s = s * r2 * r + r;
  Doubles c = Doubles{} - 1.0 / 87178291200;
  c = c * r2 + 1.0 / 479001600;
  c = c * r2 - 1.0 / 3628800;
  c = c * r2 + 1.0 / 40320;
  c = c * r2 - 1.0 / 720;
  c = c * r2 + 1.0 / 24;
  c = c * r2 - 0.5;
  c = c * r2 + 1.0;
  const Longs quadrant = (Longs)shifted & 3;
  const Longs odd = (quadrant & 1) != 0;
  const Longs sine_sign = (quadrant & 2) << 62;
  const Longs cosine_sign = ((quadrant + 1) & 2) << 62;
  const HalfFloats sines = __builtin_convertvector((Doubles)((Longs)(odd ? c : s) ^ sine_sign), HalfFloats);
  const HalfFloats cosines = __builtin_convertvector((Doubles)((Longs)(odd ? s : c) ^ cosine_sign), HalfFloats);
  __builtin_memcpy(sine, &sines, sizeof sines);
  __builtin_memcpy(cosine, &cosines, sizeof cosines);
}

}  // namespace mtp::MTP_ISA::vector_math
