// Vectors of floats for the kernels of csrc/cpu/kernels, which are compiled once for each instruction set.
//
// The build defines MTP_ISA, the namespace of one of these compilations, and MTP_LANES, floats in a vector. Compiler
// vector types do the rest, so nothing here names an instruction. A kernel's file includes no standard library header
// that brings templates or inline functions: the linker keeps one copy of those, and it could be one with AVX-512.
#pragma once

#include <stdint.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if !defined(MTP_ISA) || !defined(MTP_LANES)
#error "simd.h is for csrc/cpu/kernels, which the build compiles once for each instruction set"
#endif

namespace mtp {

// What a tensor holds, for the choice of an instantiation.
enum class FloatType { kFloat, kBFloat16, kHalf, kFloat8E4M3 };

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};

namespace MTP_ISA {

constexpr int kLanes = MTP_LANES;
typedef float Floats __attribute__((vector_size(4 * MTP_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * MTP_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * MTP_LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * MTP_LANES)));
typedef uint8_t Bytes __attribute__((vector_size(MTP_LANES)));

// Whether there is an instruction for sums of products of bf16 pairs.
#if defined(__AVX512BF16__) && MTP_LANES == 16
constexpr bool kHasPairDot = true;

// sum + a.even * b.even + a.odd * b.odd in every lane, exact products of bf16 added in fp32. Subnormals count as zero.
inline Floats pair_dot(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool kHasPairDot = false;
#endif

inline Floats broadcast(float value) { return Floats{} + value; }
inline Words broadcast_word(uint32_t value) { return Words{} + value; }

// Where the mask is all ones a, elsewhere b.
inline Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

inline float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t as_word(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline Floats widen(Shorts bits, BFloat16) { return (Floats)(__builtin_convertvector(bits, Words) << 16); }

// The exponent is moved by a product, which is exact and handles subnormals too; infinity and NaN keep theirs.
inline Floats widen(Shorts bits, Half) {
  const Words word = __builtin_convertvector(bits, Words);
  const Words magnitude = (word & 0x7fffu) << 13;
  const Words finite = (Words)((Floats)magnitude * broadcast(as_float(0x77800000u)));  // 2^112
  const Words special = magnitude | broadcast_word(0x7f800000u);
  const Words value = (Ints)(magnitude >= 0x0f800000u) ? special : finite;
  return (Floats)(value | ((word & 0x8000u) << 16));
}

// Like fp16: a product moves the exponent (by 2^120); 0x7f is NaN, and there is no infinity.
inline Floats widen(Bytes bits, Float8E4M3) {
  // Through 16 bits: g++ 12 does the whole conversion element by element.
  const Words word = __builtin_convertvector(__builtin_convertvector(bits, Shorts), Words);
  const Words magnitude = word & 0x7fu;
  const Words finite = (Words)((Floats)(magnitude << 20) * broadcast(as_float(0x7b800000u)));  // 2^120
  const Words value = (Ints)(magnitude == 0x7fu) ? broadcast_word(0x7fc00000u) : finite;
  return (Floats)(value | ((word & 0x80u) << 24));
}

inline Floats load(const float* at) {
  Floats values;
  __builtin_memcpy(&values, at, sizeof values);
  return values;
}

template <class T>
inline Floats load(const T* at) {
  if constexpr (sizeof(T) == 2) {
    Shorts bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return widen(bits, T{});
  } else {
    Bytes bits;
    __builtin_memcpy(&bits, at, sizeof bits);
    return widen(bits, T{});
  }
}

// The first `count` elements, and zeros behind them; reads nothing else.
template <class T>
inline Floats load_some(const T* at, int64_t count) {
  T values[kLanes] = {};
  __builtin_memcpy(values, at, static_cast<unsigned long>(count) * sizeof(T));
  return load(values);
}

// A whole vector, or the first `count` elements where they are fewer.
template <class T>
inline Floats load_up_to(const T* at, int64_t count) {
  return count >= kLanes ? load(at) : load_some(at, count);
}

template <class T>
inline float load_one(const T* at) {
  if constexpr (sizeof(T) == 4) {
    return *at;
  } else {
    return load_some(at, 1)[0];
  }
}

inline Words round_to_bfloat16(Floats values) {
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even
  return (Ints)(values != values) ? broadcast_word(0x7fc0u) : rounded;
}

inline uint16_t round_to_half(float value) {
  const uint32_t bits = as_word(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u);
  }
  if (magnitude >= 0x477ff000u) {
    return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 2^16, or is infinite
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the result in units of 2^-24, rounded
    return static_cast<uint16_t>(sign | (as_word(as_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// The first `count` of the values, rounded once to T.
template <class T>
inline void store_some(T* at, Floats values, int64_t count) {
  T rounded[kLanes];
  if constexpr (sizeof(T) == 4) {
    __builtin_memcpy(rounded, &values, sizeof values);
  } else if constexpr (__is_same(T, BFloat16)) {
    const Shorts bits = __builtin_convertvector(round_to_bfloat16(values), Shorts);
    __builtin_memcpy(rounded, &bits, sizeof bits);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      rounded[i].bits = round_to_half(values[i]);
    }
  }
  __builtin_memcpy(at, rounded, static_cast<unsigned long>(count) * sizeof(T));
}

template <class T>
inline void store(T* at, Floats values) {
  store_some(at, values, kLanes);
}

// The whole vector, or its first `count` values where they are fewer.
template <class T>
inline void store_up_to(T* at, Floats values, int64_t count) {
  if (count >= kLanes) {
    store(at, values);
  } else {
    store_some(at, values, count);
  }
}

typedef float Quad __attribute__((vector_size(16)));

// Halves are added until four lanes are left.
inline Quad fold(Floats values) {
#if MTP_LANES == 16
  const auto half = __builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Floats half = values;
#endif
#if MTP_LANES >= 8
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
#else
  return half;
#endif
}

// The sum of the lanes, always in the same order: halves are added until one is left.
inline float sum(Floats values) {
  const Quad four = fold(values);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sums of 2 vectors (each of them twice) or of 4, each with the bits of sum().
inline Quad sums(Floats a, Floats b) {
  const Quad x = fold(a);
  const Quad y = fold(b);
  const Quad half = __builtin_shufflevector(x, y, 0, 1, 4, 5) + __builtin_shufflevector(x, y, 2, 3, 6, 7);
  return __builtin_shufflevector(half, half, 0, 2, 0, 2) + __builtin_shufflevector(half, half, 1, 3, 1, 3);
}
inline Quad sums(Floats a, Floats b, Floats c, Floats d) {
  const Quad x = fold(a);
  const Quad y = fold(b);
  const Quad z = fold(c);
  const Quad w = fold(d);
  const Quad left = __builtin_shufflevector(x, y, 0, 1, 4, 5) + __builtin_shufflevector(x, y, 2, 3, 6, 7);
  const Quad right = __builtin_shufflevector(z, w, 0, 1, 4, 5) + __builtin_shufflevector(z, w, 2, 3, 6, 7);
  return __builtin_shufflevector(left, right, 0, 2, 4, 6) + __builtin_shufflevector(left, right, 1, 3, 5, 7);
}

// out[i] = sum(values[i]) of 16 or 8 vectors, with the bits of sum(): all are folded together, two to a vector, four,
// and so on.
#if MTP_LANES == 16
template <int kCount>
inline __attribute__((always_inline)) void sums(const Floats* values, float* out) {
  static_assert(kCount == 16 || kCount == 8);
  constexpr int kPlace[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};  // in which they come out
  constexpr int kHalf = kCount / 2;
  Floats v[kHalf];
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) {
    const Floats a = values[kPlace[i] * kCount / 16];
    const Floats b = values[kPlace[i + kHalf] * kCount / 16];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kHalf / 2; ++i) {
    const Floats a = v[i], b = v[i + kHalf / 2];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kHalf / 4; ++i) {
    const Floats a = v[i], b = v[i + kHalf / 4];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  }
  const Floats a = v[0], b = v[kHalf / 8];  // the same where there are 8: what comes behind them is not used
  const Floats all = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  __builtin_memcpy(out, &all, kCount * sizeof(float));
}
#endif

}  // namespace MTP_ISA
}  // namespace mtp
