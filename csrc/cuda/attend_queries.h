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

__device__ __forceinline__ float position_of(const Attend& a, int b, int row) {
  return static_cast<float>(
      load_index(a.positions, a.positions_are_int64, b * a.position_stride_batch + row * a.position_stride));
}

// How a row turns, for all warps.
template <class S, class Shared>
__device__ __forceinline__ void make_turns(const Attend& a, int b, int row, Shared& shared) {
  const float position = position_of(a, b, row);
#pragma unroll 1
  for (int pair = threadIdx.x; pair < S::kDim / 2; pair += S::kThreads) {
    shared.turn(pair) = pair < a.num_pairs ? sine_and_cosine(position * a.freq[pair]) : make_float2(0.0f, 1.0f);
  }
}

// The same for a warp: the turns of a lane's own pairs, lane * kCount and so on. The lanes share the sines of 32
// neighbours, so that few pairs take few of them.
template <int kCount>
__device__ __forceinline__ void find_turns(const Attend& a, float position, float2 (&turns)[kCount]) {
  const int lane = lane_anew();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    turns[i] = make_float2(0.0f, 1.0f);
  }
  float freq = lane < a.num_pairs ? a.freq[lane] : 0.0f;
#pragma unroll 1
  for (int first = 0; first < a.num_pairs; first += 32) {
    const int ahead = first + 32 + lane;
    const float next = ahead < a.num_pairs ? a.freq[ahead] : 0.0f;
    const float2 one = sine_and_cosine(position * freq);
    const bool mine = lane * kCount / 32 == first / 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int from = (lane * kCount + i) % 32;
      const float2 found = make_float2(__shfl_sync(kAll, one.x, from), __shfl_sync(kAll, one.y, from));
      turns[i] = mine ? found : turns[i];
    }
    freq = next;
  }
}

// So many elements of 16 bits, at a multiple of their size.
template <int kCount>
struct Elements {
  static_assert(kCount == 4 || kCount == 8);
  uint32_t words[kCount / 2];

  __device__ __forceinline__ void load(const bf16* at) {
    if constexpr (kCount == 8) {
      const uint4 found = load_fresh(reinterpret_cast<const uint4*>(at));
      words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
    } else {
      const uint2 found = load_fresh(reinterpret_cast<const uint2*>(at));
      words[0] = found.x, words[1] = found.y;
    }
  }

  __device__ __forceinline__ void store(bf16* at) const {
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  }
};

// A query as it comes, a lane's share of both halves.
template <class S, int kCount>
__device__ __forceinline__ void load_query(const Attend& a, int b, int row, int head, int member,
                                           Elements<kCount> (&found)[2]) {
  const auto* from = static_cast<const bf16*>(a.q) + b * a.q_stride_batch + row * a.q_stride_row +
                     (head * a.group + member) * a.q_stride_head + threadIdx.x % 32 * kCount;
  found[0].load(from);
  found[1].load(from + S::kDim / 2);
}

// The norm's weight, a lane's share of both halves; nothing where there is no norm.
template <int kCount>
__device__ __forceinline__ void load_norm(const Attend& a, Elements<kCount> (&norm)[2]) {
  if (a.norm != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      norm[half].load(static_cast<const bf16*>(a.norm) + half * (32 * kCount) + threadIdx.x % 32 * kCount);
    }
  }
}

// A query, a lane's share of both halves, normed, and turned by `turn` of each of a lane's pairs, into shared memory.
template <class S, int kCount, class Turn, class Shared>
__device__ __forceinline__ void leave_query(const Attend& a, const Elements<kCount> (&found)[2],
                                            const Elements<kCount> (&norm)[2], Turn turn, int query, Shared& shared) {
  float x[2][kCount];
  float squares = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[half][i] = found[half][i];
      squares = __fmaf_rn(x[half][i], x[half][i], squares);
    }
  }
  if (a.norm != nullptr) {
    const float factor = __frcp_rn(__fsqrt_rn(warp_sum(squares) * (1.0f / S::kDim) + a.eps));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[half][i] = x[half][i] * factor * norm[half][i];
      }
    }
  }
  if (a.freq != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float2 by = turn(i);
      const float one = x[0][i], two = x[1][i];
      x[0][i] = __fmaf_rn(one, by.y, -(two * by.x));
      x[1][i] = __fmaf_rn(two, by.y, one * by.x);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Elements<kCount> left;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      left.words[i] = pack(x[half][2 * i], x[half][2 * i + 1]);
    }
    left.store(shared.query(query, half * (32 * kCount) + threadIdx.x % 32 * kCount));
  }
}

// Zeros from that query on.
template <class S, int kCount, class Shared>
__device__ __forceinline__ void leave_no_queries(int first, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int query = first + warp; query < S::kQueries; query += S::kWarps) {
    const Elements<kCount> none = {};
    none.store(shared.query(query, lane * kCount));
    none.store(shared.query(query, 32 * kCount + lane * kCount));
  }
}

// The queries of a request and a KV head where there is one row: normed and turned, into shared memory; zeros where
// there is none. All that is in global memory is asked for before the first of it is waited for. `waits` for the
// kernels in front. All are to wait for each other after it.
template <class S, class Shared>
__device__ __forceinline__ void load_row(const Attend& a, int b, int head, bool waits, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kEach = S::kQueries / S::kWarps;  // queries of a warp
  constexpr int kCount = S::kDim / 64;
  Elements<kCount> norm[2] = {};
  load_norm(a, norm);
  Elements<kCount> found[kEach][2] = {};
  const auto load = [&] {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int member = j * S::kWarps + warp;
      if (member < a.group) {
        load_query<S>(a, b, 0, head, member, found[j]);
      }
    }
  };
  if (!waits) {
    load();
  }
  S::sync();  // what was there before is read until here
  if (a.freq != nullptr) {
    make_turns<S>(a, b, 0, shared);
  }
  S::sync();
  if (waits) {
    wait_for_others();
    load();
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int member = j * S::kWarps + warp;
    if (member >= a.group) {
      break;
    }
    const auto turn = [&](int i) { return shared.turn(lane * kCount + i); };
    leave_query<S>(a, found[j], norm, turn, member, shared);
  }
  leave_no_queries<S, kCount>(a.group, shared);
}

// The same for several rows, by warps of which none waits for another: few rows are shared by several.
template <class S, class Shared>
__device__ __forceinline__ void load_rows(const Attend& a, int b, int head, bool waits, Shared& shared) {
  constexpr int kCount = S::kDim / 64, kEach = S::kQueries / S::kWarps;  // queries that are on their way at a time
  const int warp = threadIdx.x / 32;
  const int sharing = a.rows > S::kWarps / 2 ? 1 : a.rows > S::kWarps / 4 ? 2 : S::kWarps / a.rows;  // warps a row
  Elements<kCount> norm[2] = {};
  load_norm(a, norm);
  S::sync();  // what was there before is read until here
#pragma unroll 1
  for (int row = warp / sharing; row < a.rows; row += S::kWarps / sharing) {
    float2 turns[kCount] = {};
#pragma unroll 1
    for (int first = warp % sharing; first < a.group; first += sharing * kEach) {
      Elements<kCount> found[kEach][2] = {};  // else what there was would have to be kept
      const auto load = [&] {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int member = first + j * sharing;
          if (member < a.group) {
            load_query<S>(a, b, row, head, member, found[j]);
          }
        }
      };
      if (!waits) {
        load();
      }
      if (a.freq != nullptr && first < sharing) {
        find_turns(a, position_of(a, b, row), turns);
      }
      if (waits) {
        wait_for_others();
        load();
        waits = false;
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int member = first + j * sharing;
        if (member >= a.group) {
          break;
        }
        leave_query<S>(a, found[j], norm, [&](int i) { return turns[i]; }, row * a.group + member, shared);
      }
    }
  }
  if (waits) {
    wait_for_others();
  }
  leave_no_queries<S, kCount>(a.rows * a.group, shared);
}

}  // namespace
}  // namespace mtp::cuda
