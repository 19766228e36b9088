// The queries of attend_kernel.h, normed and turned.
#pragma once

#include "attend_units.h"

namespace mtp::cuda {
namespace {

// Sine and cosine of fp32 angles as in triton_ops/_attention_math.py: exact quarter turns, then Taylor series.
__device__ __forceinline__ float2 sine_and_cosine(float x) {
  const uint32_t bits = __float_as_uint(x);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 150;
  const auto mantissa = static_cast<uint64_t>((bits & 0x7fffff) | 0x800000);
  const uint64_t factor = 0x28BE60DB9391054Aull >> min(max(-exponent, 0), 63);
  const uint64_t turns = mantissa * (factor << min(max(exponent, 0), 38));  // of 2^-62 quarters, modulo four
  const uint64_t quadrant = (turns + (uint64_t{1} << 61)) >> 62;
  const float r = static_cast<float>(static_cast<int64_t>(turns - (quadrant << 62))) * 3.4061215800865545e-19f;
  const float z = r * r;
  const float s = r + r * z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040 + z * (1.0f / 362880))));
  const float c = 1.0f + z * (-0.5f + z * (1.0f / 24 + z * (-1.0f / 720 + z * (1.0f / 40320 - z * (1.0f / 3628800)))));
  const bool odd = (quadrant & 1) != 0;
  float sine = odd ? c : s, cosine = odd ? s : c;
  sine = ((quadrant & 2) != 0) != (static_cast<int32_t>(bits) < 0) ? -sine : sine;
  cosine = ((quadrant + 1) & 2) != 0 ? -cosine : cosine;
  return make_float2(sine, cosine);
}

// How a row turns, for all warps.
template <class Shared>
__device__ __forceinline__ void make_turns(const Attend& a, int b, int row, Shared& shared) {
  const auto position = static_cast<float>(
      load_index(a.positions, a.positions_are_int64, b * a.position_stride_batch + row * a.position_stride));
#pragma unroll 1
  for (int pair = threadIdx.x; pair < kAttendDim / 2; pair += kAttendThreads) {
    shared.turns[pair] = pair < a.num_pairs ? sine_and_cosine(position * a.freq[pair]) : make_float2(0.0f, 1.0f);
  }
}

// The queries of a request and a KV head, normed and turned, into shared memory; zeros where there is none. All that is
// in global memory of a row is asked for before the first of it is waited for. `waits` for the kernels in front.
template <int kTiles, class Shared>
__device__ __forceinline__ void load_queries(const Attend& a, int b, int head, bool waits, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kEach = 8 * kTiles / kAttendWarps;
#pragma unroll 1
  for (int row = 0; row < a.rows; ++row) {
    __syncthreads();  // what was there before is read until here
    if (a.freq != nullptr) {
      make_turns(a, b, row, shared);
    }
    __syncthreads();
    if (waits && row == 0) {
      wait_for_others();
    }
    uint4 found[kEach][2];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int member = j * kAttendWarps + warp;
      if (member < a.group) {
        const auto* from = static_cast<const bf16*>(a.q) + b * a.q_stride_batch + row * a.q_stride_row +
                           (head * a.group + member) * a.q_stride_head + lane * 8;
        found[j][0] = __ldcg(reinterpret_cast<const uint4*>(from));
        found[j][1] = __ldcg(reinterpret_cast<const uint4*>(from + kAttendDim / 2));
      }
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int member = j * kAttendWarps + warp;
      if (member >= a.group) {
        break;
      }
      float x[2][8];
      float squares = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[half][i] = __bfloat162float(reinterpret_cast<const bf16*>(&found[j][half])[i]);
          squares = __fmaf_rn(x[half][i], x[half][i], squares);
        }
      }
      if (a.norm != nullptr) {
        const float factor = __frcp_rn(__fsqrt_rn(warp_sum(squares) * (1.0f / kAttendDim) + a.eps));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const bf16 norm = shared.norm[half * (kAttendDim / 2) + lane * 8 + i];
            x[half][i] = x[half][i] * factor * __bfloat162float(norm);
          }
        }
      }
      if (a.freq != nullptr) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 turn = shared.turns[lane * 8 + i];
          const float one = x[0][i], two = x[1][i];
          x[0][i] = __fmaf_rn(one, turn.y, -(two * turn.x));
          x[1][i] = __fmaf_rn(two, turn.y, one * turn.x);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint4*>(&shared.last.q[row * a.group + member][half * (kAttendDim / 2) + lane * 8]) =
            make_uint4(pack(x[half][0], x[half][1]), pack(x[half][2], x[half][3]), pack(x[half][4], x[half][5]),
                       pack(x[half][6], x[half][7]));
      }
    }
  }
#pragma unroll 1
  for (int query = a.rows * a.group + warp; query < 8 * kTiles; query += kAttendWarps) {
    auto* to = reinterpret_cast<uint4*>(&shared.last.q[query][lane * 8]);
    to[0] = to[kAttendDim / 16] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
}

}  // namespace
}  // namespace mtp::cuda
