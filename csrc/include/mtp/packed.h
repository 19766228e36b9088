// Elements as they lie in memory, in vectors of 32-bit words that hold one, two or four of them each: part j of a
// vector of words is element j of every word. Nothing is moved between lanes, so widening costs a shift or a mask.
#pragma once

#include "mtp/simd.h"

namespace mtp::MTP_ISA {

template <class T>
constexpr int kParts = 4 / sizeof(T);

template <class T>
constexpr int kGroup = kParts<T> * kLanes;  // elements in a vector of words

template <class T>
inline Words load_words(const T* at) {
  Words words = {};
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

// Two vectors of floats from consecutive elements, in the order that costs least: parts 0 and 1 of one vector of words,
// so the even elements and the odd ones, where an element has 16 bits; elsewhere the first ones and the last ones. A
// product of two rows may take any order that both have.
constexpr int64_t kPair = 2 * kLanes;  // elements

struct Pair {
  Floats first;
  Floats second;
};

template <class T>
inline Pair load_pair(const T* at) {
  if constexpr (sizeof(T) == 2) {
    const Words words = load_words(at);
    return {part<T, 0>(words), part<T, 1>(words)};
  } else {
    return {load(at), load(at + kLanes)};
  }
}

// The first `count` elements of a pair, which may be all, and zeros behind them; reads nothing else.
template <class T>
inline Pair load_pair(const T* at, int64_t count) {
  if (count >= kPair) {
    return load_pair(at);
  }
  T values[kPair] = {};
  __builtin_memcpy(values, at, static_cast<unsigned long>(count) * sizeof(T));
  return load_pair(values);
}

// From the order of a pair of floats to that of 16-bit elements, and back.
inline Pair evens_and_odds(Pair pair) {
#if MTP_LANES == 16
  return {__builtin_shufflevector(pair.first, pair.second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(pair.first, pair.second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
#elif MTP_LANES == 8
  return {__builtin_shufflevector(pair.first, pair.second, 0, 2, 4, 6, 8, 10, 12, 14),
          __builtin_shufflevector(pair.first, pair.second, 1, 3, 5, 7, 9, 11, 13, 15)};
#else
  return {__builtin_shufflevector(pair.first, pair.second, 0, 2, 4, 6),
          __builtin_shufflevector(pair.first, pair.second, 1, 3, 5, 7)};
#endif
}
inline Pair in_turn(Pair pair) {
#if MTP_LANES == 16
  return {
      __builtin_shufflevector(pair.first, pair.second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
      __builtin_shufflevector(pair.first, pair.second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
#elif MTP_LANES == 8
  return {__builtin_shufflevector(pair.first, pair.second, 0, 8, 1, 9, 2, 10, 3, 11),
          __builtin_shufflevector(pair.first, pair.second, 4, 12, 5, 13, 6, 14, 7, 15)};
#else
  return {__builtin_shufflevector(pair.first, pair.second, 0, 4, 1, 5),
          __builtin_shufflevector(pair.first, pair.second, 2, 6, 3, 7)};
#endif
}

// The first `count` elements of type S, and zeros behind them, in the order of a pair of T.
template <class T, class S>
inline Pair load_pair_like(const S* at, int64_t count) {
  if constexpr (sizeof(T) == 2 && sizeof(S) != 2) {
    return evens_and_odds(load_pair(at, count));
  } else {
    return load_pair(at, count);
  }
}

// A pair rounded once to T, of 16 bits, as it lies in memory.
template <class T>
inline Words round_words(Pair pair) {
  if constexpr (__is_same(T, BFloat16)) {
    return round_to_bfloat16(pair.first) | round_to_bfloat16(pair.second) << 16;
  } else {
    Words words = {};
    for (int i = 0; i < kLanes; ++i) {
      words[i] = round_to_half(pair.first[i]) | static_cast<uint32_t>(round_to_half(pair.second[i])) << 16;
    }
    return words;
  }
}

// The values, rounded once to T, and widened again.
template <class T>
inline Pair round_pair(Pair pair) {
  if constexpr (sizeof(T) == 2) {
    const Words words = round_words<T>(pair);
    return {part<T, 0>(words), part<T, 1>(words)};
  } else {
    return pair;
  }
}

// The first `count` elements of a pair of T, which may be all, rounded once.
template <class T>
inline void store_pair(T* at, Pair pair, int64_t count) {
  T rounded[kPair];
  if constexpr (sizeof(T) == 2) {
    const Words words = round_words<T>(pair);
    __builtin_memcpy(rounded, &words, sizeof words);
  } else {
    __builtin_memcpy(rounded, &pair, sizeof pair);
  }
  __builtin_memcpy(at, rounded, static_cast<unsigned long>(count < kPair ? count : kPair) * sizeof(T));
}

// Values as bf16 pairs for pair_dot: kPair values that are bf16 as words in the order of memory.
inline void store_words(const float* values, float* out) {
  Words words = {};
  for (int i = 0; i < kLanes; ++i) {
    words[i] = as_word(values[2 * i]) >> 16 | as_word(values[2 * i + 1]);
  }
  __builtin_memcpy(out, &words, sizeof words);
}

// All ones in the places of the first `count` of the 16-bit elements in a vector of words.
inline Words words_below(int64_t count) {
  Words mask = {};
  for (int64_t i = 0; i < count && i < kPair; ++i) {
    mask[i / 2] |= i % 2 ? 0xffff0000u : 0x0000ffffu;
  }
  return mask;
}

// Floats that a pair of what meets weights of T takes: fp32, or where pairs of bf16 are multiplied, a vector of them.
template <class T>
constexpr int64_t kPackedPair = kHasPairDot && __is_same(T, BFloat16) ? kLanes : kPair;

// Stores a pair of T's order as the products take it, with zeros behind the first `count` elements whatever it holds
// there: an infinite factor makes NaN of the zeros that were loaded.
template <class T>
inline void store_packed(float* at, Pair pair, int64_t count) {
  if constexpr (kHasPairDot && __is_same(T, BFloat16)) {
    const Words words = round_words<T>(pair) & (count >= kPair ? ~Words{} : words_below(count));
    __builtin_memcpy(at, &words, sizeof words);
    return;
  }
  __builtin_memcpy(at, &pair, sizeof pair);
  for (int64_t i = count; i < kPair; ++i) {
    at[sizeof(T) == 2 ? i % 2 * kLanes + i / 2 : i] = 0.0f;
  }
}

}  // namespace mtp::MTP_ISA
