// What the parts of frontier_kernel.h share: sizes, shared memory, and the ring's turns.
#pragma once

#include "attend_units.h"
#include "warpgroup.h"

namespace mtp::cuda {
namespace {

// What is the same for all.
struct FrontierSizes {
  static constexpr int kDim = 512, kQueries = 64, kKeys = 64;  // of a tile
  static constexpr int kMultiple = 128;                        // a chunk has a multiple of so many keys
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;     // that multiply
  static constexpr int kCopiers = 4, kAllThreads = kThreads + 32 * kCopiers;
  static constexpr int kHalf = kDim / 2, kStageBytes = kKeys * kHalf * 2, kStages = 5;
  static constexpr int kUnitsAhead = 8;         // which are found: those of the ring's tiles, and the next
  static constexpr int kBlockBytes = 64 * 128;  // of 64 columns of 64 keys or queries
  static constexpr int kScores = 32;            // a thread's, of a tile,
  static constexpr int kWeights = 16;           // in words of two

  static __device__ __forceinline__ void sync() { sync_some<kThreads>(1); }
  static __device__ __forceinline__ void sync_all() { sync_some<kAllThreads>(2); }
  // The two warps that hand each other a chunk.
  static __device__ __forceinline__ void sync_pair(int pair) { sync_some<64>(3 + pair); }
};

// `blocks` of the grid share a unit: each has some of the values' columns.
template <int blocks, bool folds>
struct Frontier : FrontierSizes {
  static constexpr int kColumnBlocks = blocks;
  static constexpr int kSlabs = 2 / blocks;  // of 128 columns, a warpgroup's
  static constexpr bool kFolds = folds, kHandsOver = folds && blocks == 1;

  static __device__ __forceinline__ int head(const Attend& a) {
    return static_cast<int>(blockIdx.x) / kColumnBlocks % a.kv_heads;
  }
  static __device__ __forceinline__ int column_block() { return static_cast<int>(blockIdx.x) % kColumnBlocks; }
};

struct FrontierShared {
  alignas(1024) unsigned char ring[FrontierSizes::kStages][FrontierSizes::kStageBytes];
  unsigned char q[FrontierSizes::kQueries * FrontierSizes::kDim * 2];
  uint64_t full[FrontierSizes::kStages], empty[FrontierSizes::kStages];
  Unit units[FrontierSizes::kUnitsAhead];
  float4 handed[4][32];  // maxima and sums of a lane's queries

  // A lane's averages, number i of 16 times four, which lie where the upper half of the queries would.
  __device__ __forceinline__ float4* averages(int pair, int i, int lane) {
    unsigned char* at = q + (pair * 2 + i / 8) * FrontierSizes::kBlockBytes + FrontierSizes::kBlockBytes / 2;
    return reinterpret_cast<float4*>(at) + i % 8 * 32 + lane;
  }

  // Eight columns of a query.
  __device__ __forceinline__ bf16* query(int query, int column) {
    const int at = column / 64 * FrontierSizes::kBlockBytes + query * 128 + ((column / 8 ^ query) % 8) * 16;
    return reinterpret_cast<bf16*>(q + at);
  }
};

// Which stage of the ring is next, and in which turn.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == FrontierSizes::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace
}  // namespace mtp::cuda
