// A centroid head after its scores, for a chain, in one launch: each block ranks its row's centroids for itself, and
// then computes the logits of some of the chosen ones' tokens, of which each 32 leave their best and their sum.
//
// Ranking: the second largest score of each half warp's 128 is a bound that at least 32 centroids reach; those that
// reach it are counted against each other. Equal scores go by centroid, equal logits by token id.
#pragma once

#include "candidates.h"
#include "device.h"

namespace mtp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kCentroids / kThreads;
constexpr int kBoundOf = kActive / 16;  // the largest scores of a half warp that are sure to be survivors
static_assert(kBoundOf == 2);

// Parts are computed eight at a time, so that a warp has four units of eight tokens; then a warp adds up a part.
constexpr int kTurnUnits = 4, kUnitTokens = 8;  // of a warp
constexpr int kTurnParts = kWarps * kTurnUnits * kUnitTokens / kPartTokens;
static_assert(kTurnParts <= kWarps);
static_assert(kHeadHidden == 32 * 8, "a lane has 16 bytes of a row");

struct Shared {
  alignas(16) uint32_t keys[kCentroids + 4];
  int numbers[kCentroids];
  uint32_t bounds[16];
  int counts[kWarps];
  int chosen[kActive];
  float logits[2][kTurnParts * kPartTokens];  // of a turn of parts and of the next
};

// Orders as the float does; larger than 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ void rank(const float* scores, Shared& shared) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  uint32_t keys[kEach];
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const float4 four = load_fresh(reinterpret_cast<const float4*>(scores + thread * kEach + i));
    keys[i] = key_of(four.x), keys[i + 1] = key_of(four.y), keys[i + 2] = key_of(four.z), keys[i + 3] = key_of(four.w);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    second = max(second, min(first, keys[i]));
    first = max(first, keys[i]);
  }
#pragma unroll
  for (int i = 1; i < 16; i *= 2) {
    const uint32_t other_first = __shfl_xor_sync(kAll, first, i), other_second = __shfl_xor_sync(kAll, second, i);
    second = max(max(second, other_second), min(first, other_first));
    first = max(first, other_first);
  }
  if (lane % 16 == 0) {
    shared.bounds[thread / 16] = second;
  }
  __syncthreads();
  const uint32_t bound = __reduce_min_sync(kAll, shared.bounds[lane % 16]);
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    mine += keys[i] >= bound;
  }
  int until = mine;  // survivors up to this lane
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int before = __shfl_up_sync(kAll, until, i);
    until += lane >= i ? before : 0;
  }
  if (lane == 31) {
    shared.counts[warp] = until;
  }
  __syncthreads();
  int place = until - mine, count = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    place += w < warp ? shared.counts[w] : 0;
    count += shared.counts[w];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (keys[i] >= bound) {
      shared.keys[place] = keys[i];
      shared.numbers[place] = thread * kEach + i;
      ++place;
    }
  }
  if (thread < 4) {
    shared.keys[count + thread] = 0;
  }
  __syncthreads();
  // Two lanes compare a survivor, each with every other four.
#pragma unroll 1
  for (int first = warp * 16; first < count; first += kThreads / 2) {
    const int i = first + lane / 2;
    const uint32_t key = i < count ? shared.keys[i] : 0;
    int ahead = 0;
#pragma unroll 4
    for (int j = lane % 2 * 4; j < count; j += 8) {
      const uint4 four = *reinterpret_cast<const uint4*>(&shared.keys[j]);
      ahead += (four.x > key || (four.x == key && j < i)) + (four.y > key || (four.y == key && j + 1 < i)) +
               (four.z > key || (four.z == key && j + 2 < i)) + (four.w > key || (four.w == key && j + 3 < i));
    }
    ahead += __shfl_xor_sync(kAll, ahead, 1);
    if (i < count && lane % 2 == 0 && ahead < kActive) {
      shared.chosen[ahead] = shared.numbers[i];
    }
  }
  __syncthreads();
}

// Where among the tokens that are sorted by centroid a token of a part is.
__device__ __forceinline__ int64_t place_of(const Candidates& c, int part, int token, const Shared& shared) {
  const int pieces = c.size / kPartTokens;
  return static_cast<int64_t>(shared.chosen[part / pieces]) * c.size + part % pieces * kPartTokens + token;
}

__device__ __forceinline__ int64_t id_of(const Candidates& c, int64_t place) {
  const int64_t id = c.ordering_is_int64 ? static_cast<const int64_t*>(c.ordering)[place]
                                         : static_cast<const int32_t*>(c.ordering)[place];
  return min(max(id, int64_t{0}), c.vocab - 1);
}

// A unit's rows of the weight, whole ones side by side. kOrdered: row i is token ordering[i]'s, so nothing waits for
// the ordering.
template <bool kOrdered>
__device__ __forceinline__ void load_unit(const Candidates& c, int64_t place, uint4 (&weight)[kUnitTokens]) {
  const bf16* const at = static_cast<const bf16*>(c.weight) + threadIdx.x % 32 * 8;
  int64_t rows[kUnitTokens];
#pragma unroll
  for (int i = 0; i < kUnitTokens; ++i) {
    rows[i] = kOrdered ? place + i : id_of(c, place + i);
  }
#pragma unroll
  for (int i = 0; i < kUnitTokens; ++i) {
    weight[i] = load_once(at + rows[i] * c.weight_stride);
  }
}

__device__ __forceinline__ void to_floats(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// x . weight[i] of 8 tokens, token i's in lane 4 i: each lane adds up 8 columns in order, then lanes as a tree.
__device__ __forceinline__ float multiply_unit(const float (&x)[8], const uint4 (&weight)[kUnitTokens]) {
  float sums[kUnitTokens];
#pragma unroll
  for (int i = 0; i < kUnitTokens; ++i) {
    float w[8];
    to_floats(weight[i], w);
    sums[i] = x[0] * w[0];
#pragma unroll
    for (int k = 1; k < 8; ++k) {
      sums[i] = __fmaf_rn(x[k], w[k], sums[i]);
    }
  }
  return warp_sums(sums);
}

// Of 32 logits, a lane each: the largest with the smallest id, then place, and the sum of their exponentials.
__device__ __forceinline__ void leave_part(const Candidates& c, int64_t at, float logit, int64_t id, int64_t place) {
  logit = logit == logit ? logit : -INFINITY;
  const float largest = warp_max(logit);
  const bool wins = logit == largest;
  const uint32_t least = __reduce_min_sync(kAll, wins ? static_cast<uint32_t>(id) : UINT32_MAX);
  const uint32_t winners = __ballot_sync(kAll, wins && static_cast<uint32_t>(id) == least);  // places go up with lanes
  const float sum = warp_sum(__expf(logit - (isinf(largest) ? 0.0f : largest)));
  if (static_cast<int>(threadIdx.x) % 32 == __ffs(winners) - 1) {
    c.part_values[at] = largest;
    c.part_orders[at] = id << 32 | place;
    c.part_max[at] = largest;
    c.part_sum[at] = sum;
  }
}

// `count` parts of a row from `first` on. A turn's units come as those of the turn before are used up.
template <bool kOrdered>
__device__ __forceinline__ void logits_of_parts(const Candidates& c, const float (&x)[8], int row, int first, int count,
                                                Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int units = count * (kPartTokens / kUnitTokens);
  const auto load = [&](int unit, uint4(&weight)[kUnitTokens]) {
    if (unit < units) {
      const int token = unit * kUnitTokens;
      load_unit<kOrdered>(c, place_of(c, first + token / kPartTokens, token % kPartTokens, shared), weight);
    }
  };
  uint4 weight[kTurnUnits][kUnitTokens];
#pragma unroll
  for (int u = 0; u < kTurnUnits; ++u) {
    load(u * kWarps + warp, weight[u]);
  }
#pragma unroll 1
  for (int turn = 0; turn < count; turn += kTurnParts) {
    const bool adds = warp < kTurnParts && turn + warp < count;
    int64_t place = 0, id = 0;
    if (adds) {
      place = place_of(c, first + turn + warp, lane, shared);
      id = id_of(c, place);
    }
    auto& logits = shared.logits[turn / kTurnParts % 2];
#pragma unroll
    for (int u = 0; u < kTurnUnits; ++u) {
      const int in_turn = u * kWarps + warp, unit = turn * (kPartTokens / kUnitTokens) + in_turn;
      if (unit < units) {
        const float logit = multiply_unit(x, weight[u]);
        load(unit + kWarps * kTurnUnits, weight[u]);
        if (lane % 4 == 0) {
          logits[in_turn * kUnitTokens + lane / 4] = logit;
        }
      }
    }
    __syncthreads();  // the turn after next writes to this place, behind the next one's barrier
    if (adds) {
      const int parts = kActive * (c.size / kPartTokens);
      leave_part(c, static_cast<int64_t>(row) * parts + first + turn + warp, logits[warp * kPartTokens + lane], id,
                 place);
    }
  }
}

// Grid (blocks of a row, rows).
template <bool kOrdered>
__global__ void __launch_bounds__(kThreads, 1) rank_candidates(const __grid_constant__ Candidates c) {
  __shared__ Shared shared;
  let_others_start();
  wait_for_others();
  const int row = blockIdx.y;
  const uint4 packed = load_fresh(
      reinterpret_cast<const uint4*>(static_cast<const bf16*>(c.normed) + row * kHeadHidden) + threadIdx.x % 32);
  rank(c.scores + static_cast<int64_t>(row) * kCentroids, shared);
  float x[8];
  to_floats(packed, x);
  const int parts = kActive * (c.size / kPartTokens) / gridDim.x;
  logits_of_parts<kOrdered>(c, x, row, blockIdx.x * parts, parts, shared);
}

// Blocks of a row: about as many altogether as there are SMs.
inline int blocks_of_row(const Candidates& c) {
  const int parts = kActive * (c.size / kPartTokens);
  int blocks = 128;
  while (blocks > 1 && (blocks * c.rows > 128 || parts % blocks != 0)) {
    blocks /= 2;
  }
  return blocks;
}

}  // namespace
}  // namespace mtp::cuda
