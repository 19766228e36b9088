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

// The same of elements of type S, in the order of a pair of T.
template <class T, class S>
inline Pair load_pair_like(const S* at, int64_t count) {
  if constexpr (sizeof(T) == 2 && sizeof(S) != 2) {
    const Pair pair = load_pair(at, count);
    float values[kPair];
    __builtin_memcpy(values, &pair, sizeof values);
    Pair even_odd;
    for (int i = 0; i < kLanes; ++i) {
      even_odd.first[i] = values[2 * i];
      even_odd.second[i] = values[2 * i + 1];
    }
    return even_odd;
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

// What the upper 16 bits leave of a value, as bf16 in the low half; nothing of infinity and NaN.
inline Words rest_of(Floats value, Words high) {
  const Words special = (Words)((high & 0x7f800000u) == 0x7f800000u);
  return round_to_bfloat16(value - (Floats)high) & ~special;
}

// All ones in the places of the first `count` of the 16-bit elements in a vector of words.
inline Words words_below(int64_t count) {
  Words mask = {};
  for (int64_t i = 0; i < count && i < kPair; ++i) {
    mask[i / 2] |= i % 2 ? 0xffff0000u : 0x0000ffffu;
  }
  return mask;
}

// A pair in the order of 16 bits as two vectors of bf16 pairs for pair_dot, which add up to it within 2^-17 of a value;
// zeros behind the first `count` elements. An infinite weight makes NaN of a rest of zero.
inline void store_split(float* at, Pair pair, int64_t count) {
  const Words mask = count >= kPair ? ~Words{} : words_below(count);
  const Words first = (Words)pair.first & 0xffff0000u;
  const Words second = (Words)pair.second & 0xffff0000u;
  const Words high = (first >> 16 | second) & mask;
  const Words low = (rest_of(pair.first, first) | rest_of(pair.second, second) << 16) & mask;
  __builtin_memcpy(at, &high, sizeof high);
  __builtin_memcpy(at + kLanes, &low, sizeof low);
}

}  // namespace mtp::MTP_ISA
