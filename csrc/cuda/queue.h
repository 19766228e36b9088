// A warp's weights on their way: asynchronous copies that run ahead of the products, over the waits between them.
#pragma once

#include "device.h"
#include "segment.h"

namespace mtp::cuda {

constexpr int kWarps = 1 << kLog2Warps;
constexpr int kThreads = 32 * kWarps;
constexpr int kQuad = 4;   // pieces that a thread queues, waits for and multiplies at a time
constexpr int kQuads = 4;  // that are on the way
static_assert(kShareDepth == kQuad * kPieceDepth);

// Some of the rows, and the blocks that take them from the first product to the last and ask no other's.
struct Group {
  int first_row, rows;
  int block, blocks;  // this one's number in the group, and how many there are
  int number;
};

__device__ __forceinline__ Group group_of(const Segment& s) {
  const int number = static_cast<int>(blockIdx.x) / s.group_blocks;
  const int first = number * s.group_rows;
  return {first, min(s.group_rows, s.rows - first), static_cast<int>(blockIdx.x) - number * s.group_blocks,
          s.group_blocks, number};
}

// Which units of a product are a block's, and which of those a warp's.
__device__ __forceinline__ int first_of_block(const Product& p, const Group& group) {
  const int block = group.block - p.first_block;
  return block < 0 ? block + group.blocks : block;
}

__device__ __forceinline__ int units_of_block(const Product& p, const Group& group) {
  return p.units_each + (first_of_block(p, group) < p.units_more ? 1 : 0);
}

// The first of those that is a warp's; the next is kWarps >> log2_warps further.
__device__ __forceinline__ int first_of_warp(const Product& p) {
  return (static_cast<int>(threadIdx.x) / 32 + kWarps - p.first_warp) % kWarps >> p.log2_warps;
}

// Which of the warps that share a unit this is.
__device__ __forceinline__ int part_of_warp(int log2_warps) {
  return static_cast<int>(threadIdx.x) / 32 & ((1 << log2_warps) - 1);
}

// What a warp reads of weights, in its order: runs of pieces that lie one behind the other in eight rows. Lane r knows
// run r, counted over all products.
struct Runs {
  const bf16* at = nullptr;
  int64_t stride = 0;
  int pieces = 0;

  __device__ Runs(const Segment& s, const Group& group) {
    int run = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < s.num_products; ++i) {
      const Product& p = s.products[i];
      const int first = first_of_warp(p);
      const int log2_step = kLog2Warps - p.log2_warps;
      const int here = max(0, units_of_block(p, group) - first + (1 << log2_step) - 1) >> log2_step;
      if (run >= 0 && run < here) {
        const int unit = first_of_block(p, group) + (first + (run << log2_step)) * group.blocks;
        const int part = part_of_warp(p.log2_warps);
        const int log2_shares = p.log2_warps - (p.second != 0);
        const int share = part & ((1 << log2_shares) - 1);
        stride = p.stride;
        pieces = p.pieces;
        at = static_cast<const bf16*>(p.weight) + static_cast<int64_t>(unit) * kUnitColumns * stride;
        at += (part >> log2_shares) * p.second + share * pieces * kPieceDepth;
      }
      run -= here;
    }
  }
};

// A ring of kQuads times four pieces, 16 bytes each, for each thread, which fills and reads its own alone: nobody has
// to be told. A lane has row lane / 4 of a run and 8 elements of each piece. Runs are a multiple of four pieces long.
struct Queue {
  static constexpr uint32_t kQuadBytes = kQuad * kThreads * 16;

  Runs runs;
  const bf16* at = nullptr;
  uint32_t base;
  uint32_t offset = 0;
  int run = -1;
  int left = 0;

  __device__ Queue(const Segment& s, const Group& group, const void* ring)
      : runs(s, group), base(shared_address(ring) + threadIdx.x * 16) {
#pragma unroll 1
    for (int i = 0; i < kQuads; ++i) {
      push();
    }
  }

  __device__ __forceinline__ void push() {
    if (left == 0 && run < kMostRuns - 1) {
      ++run;
      left = __shfl_sync(kAll, runs.pieces, run);
      const int64_t stride = __shfl_sync(kAll, runs.stride, run);
      at = reinterpret_cast<const bf16*>(__shfl_sync(kAll, reinterpret_cast<uint64_t>(runs.at), run));
      at += threadIdx.x % 32 / 4 * stride + threadIdx.x % 4 * 8;
    }
    if (left > 0) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(base + offset + j * kThreads * 16),
                     "l"(at + j * kPieceDepth)
                     : "memory");
      }
      at += kQuad * kPieceDepth;
      left -= kQuad;
    }
    commit_copies();
    offset = offset + kQuadBytes == kQuads * kQuadBytes ? 0 : offset + kQuadBytes;
  }

  __device__ __forceinline__ void pop(uint4 (&pieces)[kQuad]) {
    wait_for_copies<kQuads - 1>();
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(pieces[j].x), "=r"(pieces[j].y), "=r"(pieces[j].z), "=r"(pieces[j].w)
                   : "r"(base + offset + j * kThreads * 16)
                   : "memory");
    }
    push();
  }
};

}  // namespace mtp::cuda
