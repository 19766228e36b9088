// Functions of vectors of floats, within a few units of the last place of fp32.
#pragma once

#include "mtp/simd.h"

namespace mtp {
namespace MTP_ISA {

// x = n * ln 2 + r: 2^n and exp(r) - 1, for x in [-87, 87]; NaN stays NaN in the latter.
inline Floats split_exp(Floats x, Floats* scale) {
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Floats shifted = x * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first of few bits
  *scale = (Floats)((((Words)shifted - (Words)magic) + 127u) << 23);
  Floats p = broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  return p * r * r + r;
}

// For x <= 87; below -87 it is 0.
inline Floats exp(Floats x) {
  const Ints tiny = x < broadcast(-87.0f);
  Floats scale;
  const Floats less_one = split_exp(select(tiny, broadcast(-87.0f), x), &scale);
  return select(tiny, Floats{}, scale + scale * less_one);
}

// (exp(2 |x|) - 1) / (exp(2 |x|) + 1), with exp - 1 kept apart so that small x lose nothing.
inline Floats tanh(Floats x) {
  const Words sign = (Words)x & 0x80000000u;
  const Floats magnitude = (Floats)((Words)x & 0x7fffffffu) * 2.0f;
  Floats scale;
  const Floats p = split_exp(select(magnitude > broadcast(40.0f), broadcast(40.0f), magnitude), &scale);
  const Floats less_one = scale * p + (scale - 1.0f);
  return (Floats)((Words)(less_one / (less_one + 2.0f)) | sign);
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

}  // namespace MTP_ISA
}  // namespace mtp
