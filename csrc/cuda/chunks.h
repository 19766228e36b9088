// How draft_attention cuts a request's visible keys into chunks, and folds these: as `chunk_size` and `fold` in
// triton_ops/_attention_kernels.py.
#pragma once

#include <cstdint>

#include "device.h"

namespace mtp::cuda {

// Keys of a chunk, a multiple of `multiple` (a power of two): of the visible keys alone.
__device__ __forceinline__ int keys_of_chunk(int visible, float chunk_weight, int log2_max_chunks, int multiple) {
  int keys = static_cast<int>(ceilf(__fsqrt_rn(__fmul_rn(static_cast<float>(visible), chunk_weight))));
  keys = max(max(keys, (visible + (1 << log2_max_chunks) - 1) >> log2_max_chunks), 1);
  return (keys + multiple - 1) & -multiple;
}

// n / size, rounded up.
__device__ __forceinline__ int how_many(int n, int size) {
  return static_cast<int>((static_cast<unsigned>(n) + static_cast<unsigned>(size) - 1) / static_cast<unsigned>(size));
}

// Of the averages of what came before, and of what is folded into it.
struct Shrinks {
  float before, more;
};

// The maximum and sum of a chunk, or of a fold, into those before it. -inf and 0 are those of no key at all.
__device__ __forceinline__ Shrinks fold_sums(float& top, float& total, float new_top, float new_total) {
  const float best = fmaxf(top, new_top);
  const float base = best == -INFINITY ? 0.0f : best;
  const Shrinks found = {exp2_approx(top - base), exp2_approx(new_top - base)};
  total = __fmaf_rn(total, found.before, __fmul_rn(new_total, found.more));
  top = best;
  return found;
}

__device__ __forceinline__ float fold_average(float y, float more, Shrinks shrinks) {
  return __fmaf_rn(y, shrinks.before, __fmul_rn(more, shrinks.more));
}

}  // namespace mtp::cuda
