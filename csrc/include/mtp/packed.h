// Elements as they lie in memory, in vectors of 32-bit words that hold one, two or four of them each: part j of a
// vector of words is element j of every word. Nothing is moved between lanes, so widening costs a shift or a mask.
#pragma once

#include "mtp/simd.h"

namespace mtp::MTP_ISA::packed {

template <class T>
constexpr int kParts = 4 / sizeof(T);

template <class T>
constexpr int kGroup = kParts<T> * kLanes;  // elements in a vector of words

template <class T>
inline Words load_words(const T* at) {
  Words words;
  __builtin_memcpy(&words, at, sizeof words);
  return words;
}

// The first `count` elements, and zeros behind them; reads nothing else.
template <class T>
inline Words load_words_some(const T* at, int64_t count) {
  T values[kGroup<T>] = {};
  __builtin_memcpy(values, at, static_cast<unsigned long>(count) * sizeof(T));
  return load_words(values);
}

// Part kPart of the words, in fp32. What the shifts do is explained at simd.h's widen().
template <class T, int kPart>
inline Floats part(Words words) {
  if constexpr (__is_same(T, float)) {
    return (Floats)words;
  } else if constexpr (__is_same(T, BFloat16)) {
    return (Floats)(kPart == 0 ? words << 16 : words & 0xffff0000u);
  } else if constexpr (__is_same(T, Half)) {
    const Words magnitude = kPart == 0 ? (words & 0x7fffu) << 13 : (words & 0x7fff0000u) >> 3;
    const Words sign = kPart == 0 ? (words & 0x8000u) << 16 : words & 0x80000000u;
    const Words finite = (Words)((Floats)magnitude * as_float(0x77800000u));  // 2^112
    const Words special = magnitude | broadcast_word(0x7f800000u);
    const Words value = (Ints)(magnitude >= 0x0f800000u) ? special : finite;
    return (Floats)(value | sign);
  } else {
    const Words byte = words << (24 - 8 * kPart);  // in the highest bits
    const Words magnitude = (byte & 0x7f000000u) >> 4;
    const Words finite = (Words)((Floats)magnitude * as_float(0x7b800000u));  // 2^120
    const Words value = (Ints)(magnitude == 0x07f00000u) ? broadcast_word(0x7fc00000u) : finite;
    return (Floats)(value | (byte & 0x80000000u));
  }
}

template <int kWidth>
struct Lanes {
  typedef float Vector __attribute__((vector_size(4 * kWidth)));
};

// The sum of the lanes in the order of simd.h's sum(), by vectors of half the size each.
template <int kWidth>
inline float sum_lanes(typename Lanes<kWidth>::Vector values) {
  if constexpr (kWidth == 2) {
    return values[0] + values[1];
  } else {
    typename Lanes<kWidth / 2>::Vector halves[2];
    __builtin_memcpy(halves, &values, sizeof values);
    return sum_lanes<kWidth / 2>(halves[0] + halves[1]);
  }
}

inline float sum(Floats values) { return sum_lanes<kLanes>(values); }

}  // namespace mtp::MTP_ISA::packed
