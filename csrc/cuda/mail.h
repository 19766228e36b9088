// Results that blocks of one launch hand each other: each value travels with the number of the launch, its epoch, in
// one 8-byte word, which is written and read whole. Who needs it looks at the word until the epoch is right.
#pragma once

#include <cstdint>

#include "device.h"

namespace mtp::cuda {

constexpr int kPatience = 1 << 24;  // looks at a word before the launch fails: some ten seconds

__device__ __forceinline__ uint64_t word(uint32_t value, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | value;
}

__device__ __forceinline__ void post(uint64_t* at, uint64_t one, uint64_t two) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(one), "l"(two) : "memory");
}

__device__ __forceinline__ void post(uint64_t* at, uint64_t one) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(one) : "memory");
}

__device__ __forceinline__ void peek(const uint64_t* at, uint64_t& one, uint64_t& two) {
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(one), "=l"(two) : "l"(at) : "memory");
}

__device__ __forceinline__ uint64_t peek(const uint64_t* at) {
  uint64_t found;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(found) : "l"(at) : "memory");
  return found;
}

__device__ __forceinline__ bool is_of(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

// Looks at words, `at(i)` and the one behind it, until all have the epoch; the whole warp together. Where `live(i)` is
// false nothing is read.
template <int kPairs, class Live, class At>
__device__ __forceinline__ void receive(uint32_t (&values)[2 * kPairs], uint32_t epoch, Live live, At at) {
  int looks = 0;
  bool all;
  do {
    uint64_t words[2 * kPairs];
    all = true;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      words[2 * i] = words[2 * i + 1] = word(0, epoch);
      if (live(i)) {
        peek(at(i), words[2 * i], words[2 * i + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      all = all && is_of(words[i], epoch);
      values[i] = static_cast<uint32_t>(words[i]);
    }
    if (++looks > kPatience) {
      __trap();
    }
  } while (!__all_sync(kAll, all));
}

// The same of single words.
template <int kCount, class Live, class At>
__device__ __forceinline__ void receive_each(float (&values)[kCount], uint32_t epoch, Live live, At at) {
  int looks = 0;
  bool all;
  do {
    uint64_t words[kCount];
    all = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i] = word(0, epoch);
      if (live(i)) {
        words[i] = peek(at(i));
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      all = all && is_of(words[i], epoch);
      values[i] = __uint_as_float(static_cast<uint32_t>(words[i]));
    }
    if (++looks > kPatience) {
      __trap();
    }
  } while (!__all_sync(kAll, all));
}

}  // namespace mtp::cuda
