// How draft_attention cuts a request's visible keys into chunks: as `chunk_size` in triton_ops/_attention_kernels.py.
#pragma once

#include <cstdint>

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

}  // namespace mtp::cuda
