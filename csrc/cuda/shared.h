// What a segment's blocks have in shared memory, and how its rows are dealt to lanes.
#pragma once

#include "device.h"
#include "queue.h"
#include "segment.h"

namespace mtp::cuda {

constexpr int kPad = 32;  // elements behind a row in shared memory: eight lanes' 16 bytes lie in different banks
constexpr int kMostSplitRows = 16;
constexpr int kStaged = 2048;  // elements of x that a warp takes from the mail at a time
static_assert(kThreads == kHidden, "a thread has a column of x");

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_tanh(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

constexpr int kSums = 2;
constexpr int kHalves = 2;
constexpr int kHalfDepth = kHidden / kHalves;  // a quad
static_assert(kHalfDepth == kQuad * kPieceDepth);

__device__ __forceinline__ float total(const float (&sums)[kSums][4], int k) { return sums[0][k] + sums[1][k]; }

// Of 16 rows.
__host__ __device__ constexpr int tiles(int rows) { return (rows + 15) / 16; }

// kRows: of the batch, rounded up.
template <int kRows>
struct Shared {
  // Of a unit of the products that all warps share: with many rows, each 16 of them are a unit of their own.
  static constexpr int kSplitRows = kRows < kMostSplitRows ? kRows : kMostSplitRows;
  static constexpr int kColumns = kStaged / kSplitRows < kHidden ? kStaged / kSplitRows : kHidden;
  // Elements of x that a thread keeps: one, or of a row that is a warp's, a column of each 32.
  static constexpr int kHeld = kRows == kWarps ? kWarps : 1;
  union Warp {
    bf16 x[kSplitRows][kColumns + kPad];   // of its share of the depth
    float sums[kSplitRows][kUnitColumns];  // its share of a unit
  };
  alignas(16) bf16 normed[kRows][kHidden + kPad];
  alignas(16) Warp warps[kWarps];
  alignas(16) float squares[2][kWarps];  // of one row
  bf16 norms[4][kHidden];
  int chunks[kRows];
};

enum Norm { kPostAttention, kPreFeedforward, kPostFeedforward, kNextNorm };

// Row `row` of the 16 of a tile's half; where there is one row alone, every lane takes that.
template <int kRows>
__device__ __forceinline__ int row_of_lane(int tile, int half) {
  return kRows == 1 ? 0 : tile * 16 + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
}

}  // namespace mtp::cuda
