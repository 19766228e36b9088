// The norms of a segment: rows from the mail, added to the residual, and normed for the products that follow.
#pragma once

#include "mail.h"
#include "shared.h"

namespace mtp::cuda {

// What becomes of x in each half of a layer. Rows are those of the group.
struct Step {
  const uint64_t* from;  // what is normed and added to it
  const bf16* residual;  // x before it where it comes from memory, else null
  uint64_t* normed;      // the mail for many rows
  int after;             // norms: of what is added,
  int before;            // and of the sum
  float scalar;
  bool last;
};

__device__ __forceinline__ float rms_scale(float squares, float eps) {
  return rsqrtf(squares * (1.0f / kHidden) + eps);
}

__device__ __forceinline__ float added(float x, float more, float scale, float norm, float scalar) {
  return rounded(__fmaf_rn(more * scale, norm, x) * scalar);
}

// x = (x + rmsnorm(mail) * norm) * scalar, rounded, of kCount rows from `first` on, of which those before `end` are
// there, a thread a column of each; then `keep(row, x, normed)` with their own norm. Squares are added over 32 columns
// as a tree, and these sums in order.
template <int kCount, int kRows, class Keep>
__device__ __forceinline__ void take_rows(const Segment& s, const Step& step, uint32_t epoch, int first, int end,
                                          float (&x)[kCount], Shared<kRows>& shared, Keep keep) {
  const int column = threadIdx.x;
  if (step.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = first + i < end ? __bfloat162float(load_fresh(step.residual + (first + i) * kHidden + column)) : 0.0f;
    }
  }
  float more[kCount];
  receive_each<kCount>(
      more, epoch, [&](int i) { return first + i < end; },
      [&](int i) { return step.from + (first + i) * kHidden + column; });
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    float squares[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float value = turn == 0 ? more[i] : x[i];
      squares[i] = value * value;
    }
    constexpr int kLanesEach = 32 / kCount;
    const float sum = warp_sums(squares);
    if (threadIdx.x % kLanesEach == 0) {
      shared.squares[turn][threadIdx.x % 32 / kLanesEach][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    const float norm = __bfloat162float(shared.norms[turn == 0 ? step.after : step.before][column]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; w += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&shared.squares[turn][i][w]);
        sum = sum + four.x + four.y + four.z + four.w;
      }
      const float scale = rms_scale(sum, s.eps);
      if (turn == 0) {
        x[i] = added(x[i], more[i], scale, norm, step.scalar);
      } else {
        keep(first + i, x[i], __float2bfloat16(x[i] * scale * norm));
      }
    }
  }
}

// The same of as many rows as there are warps, a warp a row, whose lanes have a column of each 32: nobody waits for
// another warp. Sums are added in the same order.
template <int kRows, class Keep>
__device__ __forceinline__ void take_row_of_warp(const Segment& s, const Step& step, uint32_t epoch, int rows,
                                                 float (&x)[kWarps], const Shared<kRows>& shared, Keep keep) {
  static_assert(kHidden == kWarps * 32 && kRows == kWarps);
  const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool live = row < rows;
  if (step.residual != nullptr) {
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      x[k] = live ? __bfloat162float(load_fresh(step.residual + row * kHidden + k * 32 + lane)) : 0.0f;
    }
  }
  float more[kWarps];
  receive_each<kWarps>(
      more, epoch, [&](int) { return live; }, [&](int k) { return step.from + row * kHidden + k * 32 + lane; });
  const auto scale_of = [&](const float (&values)[kWarps]) {
    float squares[kWarps];
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      squares[k] = values[k] * values[k];
    }
    const float one = warp_sums(squares);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      sum += __shfl_sync(kAll, one, k * (32 / kWarps));
    }
    return rms_scale(sum, s.eps);
  };
  const float scale = scale_of(more);
#pragma unroll
  for (int k = 0; k < kWarps; ++k) {
    x[k] = added(x[k], more[k], scale, __bfloat162float(shared.norms[step.after][k * 32 + lane]), step.scalar);
  }
  const float scale_after = scale_of(x);
#pragma unroll
  for (int k = 0; k < kWarps; ++k) {
    const float norm = __bfloat162float(shared.norms[step.before][k * 32 + lane]);
    keep(row, k * 32 + lane, x[k], __float2bfloat16(x[k] * scale_after * norm));
  }
}

__device__ __forceinline__ void leave(const Segment& s, int at, float x, bf16 normed) {
  if (s.x_out != nullptr) {
    static_cast<bf16*>(s.x_out)[at] = __float2bfloat16(x);
  }
  if (s.normed != nullptr) {
    static_cast<bf16*>(s.normed)[at] = normed;
  }
}

// Every block needs all normed rows of its group: each computes few of them for itself; of many, a block computes one
// and posts it.
template <int kRows>
__device__ __forceinline__ void take_in(const Segment& s, const Group& group, const Step& step, uint32_t epoch,
                                        float (&x)[Shared<kRows>::kHeld], Shared<kRows>& shared) {
  const auto keep_here = [&](int row, int column, float value, bf16 normed) {
    shared.normed[row][column] = normed;
    if (step.last && row < group.rows && row == group.block) {
      leave(s, (group.first_row + row) * kHidden + column, value, normed);
    }
  };
  if constexpr (kRows <= kRowsOfAThread) {
    take_rows(s, step, epoch, 0, group.rows, x, shared,
              [&](int row, float value, bf16 normed) { keep_here(row, threadIdx.x, value, normed); });
  } else if constexpr (kRows == kWarps) {
    take_row_of_warp(s, step, epoch, group.rows, x, shared, keep_here);
  } else {
    if (group.block < group.rows) {
      take_rows(s, step, epoch, group.block, group.rows, x, shared, [&](int row, float value, bf16 normed) {
        const float one = __bfloat162float(normed);
        const float two = __shfl_down_sync(kAll, one, 1);
        if (threadIdx.x % 2 == 0) {
          post(step.normed + (row * kHidden + threadIdx.x) / 2, word(pack(one, two), epoch));
        }
        if (step.last) {
          leave(s, (group.first_row + row) * kHidden + threadIdx.x, value, normed);
        }
      });
    }
    constexpr int kPairs = kRows * kHidden / 4 / kThreads;
    uint32_t words[2 * kPairs];
    const auto at = [](int k) { return (k * kThreads + static_cast<int>(threadIdx.x)) * 4; };
    receive<kPairs>(
        words, epoch, [&](int k) { return at(k) < group.rows * kHidden; },
        [&](int k) { return step.normed + at(k) / 2; });
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      auto* to = &shared.normed[at(k) / kHidden][at(k) % kHidden];
      *reinterpret_cast<uint2*>(to) = make_uint2(words[2 * k], words[2 * k + 1]);
    }
  }
  __syncthreads();
}

}  // namespace mtp::cuda
