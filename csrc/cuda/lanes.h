// Sums and maxima over the lanes of a warp.
#pragma once

#include <cstdint>

namespace mtp::cuda {

constexpr uint32_t kAll = 0xffffffffu;

// Sums of kCount values a lane, a power of two, with few shuffles, each as a tree: sum i in lanes i * 32 / kCount and
// those that follow.
template <int kCount>
__device__ __forceinline__ float warp_sums(const float (&x)[kCount]) {
  const int lane = threadIdx.x % 32;
  float sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] = x[i];
  }
#pragma unroll
  for (int count = kCount / 2, i = 16; count > 0; count /= 2, i /= 2) {
    const bool upper = (lane & i) != 0;  // keeps the upper half of the sums, and gives the lower half away
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const float away = upper ? sums[k] : sums[count + k];
      sums[k] = (upper ? sums[count + k] : sums[k]) + __shfl_xor_sync(kAll, away, i);
    }
  }
#pragma unroll
  for (int i = 16 / kCount; i > 0; i /= 2) {
    sums[0] += __shfl_xor_sync(kAll, sums[0], i);
  }
  return sums[0];
}

__device__ __forceinline__ float warp_sum(float x) {
  const float one[1] = {x};
  return warp_sums(one);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAll, x, i));
  }
  return x;
}

}  // namespace mtp::cuda
