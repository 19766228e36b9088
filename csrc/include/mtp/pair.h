// Two vectors of floats from consecutive elements, in the order that is cheapest for the element type: 32 bits with two
// bf16 widen with a shift and a mask, so the first vector has the even elements and the second the odd ones (on a
// little-endian machine). Of other types the vectors hold the first and the last elements. A product of two rows may
// take any order that both have.
#pragma once

#include "mtp/simd.h"

namespace mtp::MTP_ISA {

constexpr int64_t kPair = 2 * kLanes;  // elements

struct Pair {
  Floats first;
  Floats second;
};

template <class T>
inline Pair load_pair(const T* at) {
  if constexpr (__is_same(T, BFloat16)) {
    Words words;
    __builtin_memcpy(&words, at, sizeof words);
    return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
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
  if constexpr (__is_same(T, BFloat16) && !__is_same(S, BFloat16)) {
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

// The values, rounded once to T, and widened again.
template <class T>
inline Pair round_pair(Pair pair) {
  if constexpr (__is_same(T, float)) {
    return pair;
  } else if constexpr (__is_same(T, BFloat16)) {
    return {(Floats)(round_to_bfloat16(pair.first) << 16), (Floats)(round_to_bfloat16(pair.second) << 16)};
  } else {
    T rounded[kPair];
    store(rounded, pair.first);
    store(rounded + kLanes, pair.second);
    return load_pair(rounded);
  }
}

// The first `count` elements of a pair of T, which may be all, rounded once.
template <class T>
inline void store_pair(T* at, Pair pair, int64_t count) {
  T rounded[kPair];
  if constexpr (__is_same(T, BFloat16)) {
    const Words words = round_to_bfloat16(pair.first) | (round_to_bfloat16(pair.second) << 16);
    __builtin_memcpy(rounded, &words, sizeof words);
  } else {
    store(rounded, pair.first);
    store(rounded + kLanes, pair.second);
  }
  __builtin_memcpy(at, rounded, static_cast<unsigned long>(count < kPair ? count : kPair) * sizeof(T));
}

}  // namespace mtp::MTP_ISA
