// What a segment's blocks have in shared memory, and how its rows are dealt to lanes.
#pragma once

#include "device.h"
#include "queue.h"
#include "segment.h"

namespace mtp::cuda {

constexpr int kPad = 32;       // elements behind a row in shared memory: eight lanes' 16 bytes lie in different banks
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

constexpr int kRowsOfAThread = 4;  // of so many rows at most, a thread has a column of each to norm

// kRows: of a group, rounded up.
template <int kRows>
struct Shared {
  static constexpr int kColumns = kStaged / kRows < kHidden ? kStaged / kRows : kHidden;
  // Elements of x that a thread keeps: of a row that is a warp's, a column of each 32; of more rows, of one alone.
  static constexpr int kHeld = kRows <= kRowsOfAThread || kRows == kWarps ? kRows : 1;
  union Warp {
    bf16 x[kRows][kColumns + kPad];   // of its share of the depth
    float sums[kRows][kUnitColumns];  // its share of a unit
  };
  alignas(16) bf16 normed[kRows][kHidden + kPad];
  alignas(16) Warp warps[kWarps];
  alignas(16) float squares[2][kRows <= kRowsOfAThread ? kRows : 1][kWarps];
  bf16 norms[4][kHidden];
  int chunks[kRows];
};

enum Norm { kPostAttention, kPreFeedforward, kPostFeedforward, kNextNorm };

// The row of a lane in either half of a tile of 16; of fewer rows than 8 some lanes take the same.
template <int kRows>
__device__ __forceinline__ int row_of_lane(int half) {
  return half * 8 + static_cast<int>(threadIdx.x) % 32 / 4 % (kRows < 8 ? kRows : 8);
}

}  // namespace mtp::cuda
