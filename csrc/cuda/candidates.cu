// A centroid head after its scores, for a chain, in one launch: each block ranks its row's centroids for itself, and
// then computes the logits of some of the chosen ones' tokens, of which each 32 leave their best and their sum.
//
// Ranking: the second largest score of each half warp's 128 is a bound that at least 32 centroids reach; those that
// reach it are counted against each other. Equal scores go by centroid, equal logits by token id.
#include "candidates.h"

#include <cuda_runtime.h>

#include "device.h"
#include "launch.h"

namespace mtp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kCentroids / kThreads;
constexpr int kBoundOf = kActive / 16;  // the largest scores of a half warp that are sure to be survivors
static_assert(kBoundOf == 2);

struct Shared {
  alignas(16) bf16 x[kHeadHidden];
  alignas(16) uint32_t keys[kCentroids + 4];
  int numbers[kCentroids];
  uint32_t bounds[16];
  int counts[kWarps];
  int chosen[kActive];
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
  uint32_t bound = shared.bounds[lane % 16];
#pragma unroll
  for (int i = 1; i < 16; i *= 2) {
    bound = min(bound, __shfl_xor_sync(kAll, bound, i));
  }
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
#pragma unroll 1
  for (int i = thread; i < count; i += kThreads) {
    const uint32_t key = shared.keys[i];
    int ahead = 0;
#pragma unroll 2
    for (int j = 0; j < count; j += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&shared.keys[j]);
      ahead += (four.x > key || (four.x == key && j < i)) + (four.y > key || (four.y == key && j + 1 < i)) +
               (four.z > key || (four.z == key && j + 2 < i)) + (four.w > key || (four.w == key && j + 3 < i));
    }
    if (ahead < kActive) {
      shared.chosen[ahead] = shared.numbers[i];
    }
  }
  __syncthreads();
}

constexpr int kUnits = kPartTokens / 8, kPieces = kHeadHidden / kPieceDepth;

// A lane's token of a part: 4 units of 8 tokens.
struct Token {
  int64_t place = 0, id = 0;
};

__device__ __forceinline__ Token token_of(const Candidates& c, int part, const Shared& shared) {
  const int pieces = c.size / kPartTokens;
  Token found;
  found.place =
      static_cast<int64_t>(shared.chosen[part / pieces]) * c.size + part % pieces * kPartTokens + threadIdx.x % 32;
  found.id = c.ordering_is_int64 ? static_cast<const int64_t*>(c.ordering)[found.place]
                                 : static_cast<const int32_t*>(c.ordering)[found.place];
  found.id = min(max(found.id, int64_t{0}), c.vocab - 1);
  return found;
}

__device__ __forceinline__ void load_unit(const Candidates& c, const Token& token, int unit, uint4 (&weight)[kPieces]) {
  const int lane = threadIdx.x % 32;
  const int64_t row = __shfl_sync(kAll, c.ordered ? token.place : token.id, unit * 8 + lane / 4);
  const bf16* at = static_cast<const bf16*>(c.weight) + row * c.weight_stride + lane % 4 * 8;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    weight[j] = load_once(at + j * kPieceDepth);
  }
}

// Parts first, first + kWarps, ... below end, lane l at last with token l. The next part's units come as this one's are
// used up.
__device__ __forceinline__ void logits_of_parts(const Candidates& c, int row, int first, int end,
                                                const Shared& shared) {
  const int lane = threadIdx.x % 32;
  uint4 weight[kUnits][kPieces];
  Token token, next;
  if (first < end) {
    token = token_of(c, first, shared);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_unit(c, token, u, weight[u]);
    }
  }
#pragma unroll 1
  for (int part = first; part < end; part += kWarps) {
    const bool more = part + kWarps < end;
    if (more) {
      next = token_of(c, part + kWarps, shared);
    }
    float logit = 0.0f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float y[2][4] = {};
      const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const uint4 x = *reinterpret_cast<const uint4*>(&shared.x[j * kPieceDepth + lane % 4 * 8]);
        multiply(y[j % 2], x, none, weight[u][j]);
      }
      if (more) {
        load_unit(c, next, u, weight[u]);
      }
      // Every row of the product is this row's: a lane has columns 2 * (lane % 4) and the next.
      const float even = __shfl_sync(kAll, y[0][0] + y[1][0], lane % 8 / 2);
      const float odd = __shfl_sync(kAll, y[0][1] + y[1][1], lane % 8 / 2);
      if (lane / 8 == u) {
        logit = lane % 2 ? odd : even;
      }
    }
    logit = logit == logit ? logit : -INFINITY;
    const float largest = warp_max(logit);
    int64_t order = logit == largest ? token.id << 32 | token.place : INT64_MAX;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      order = min(order, __shfl_xor_sync(kAll, order, i));
    }
    const float sum = warp_sum(__expf(logit - (isinf(largest) ? 0.0f : largest)));
    if (lane == 0) {
      const int64_t to = static_cast<int64_t>(row) * (kActive * (c.size / kPartTokens)) + part;
      c.part_values[to] = largest;
      c.part_orders[to] = order;
      c.part_max[to] = largest;
      c.part_sum[to] = sum;
    }
    token = next;
  }
}

// Grid (blocks of a row, rows).
__global__ void __launch_bounds__(kThreads, 1) rank_candidates(const __grid_constant__ Candidates c) {
  __shared__ Shared shared;
  let_others_start();
  wait_for_others();
  const int row = blockIdx.y;
  const bool brings_x = threadIdx.x < kHeadHidden / 8;
  uint4 x = make_uint4(0, 0, 0, 0);
  if (brings_x) {
    x = load_fresh(reinterpret_cast<const uint4*>(static_cast<const bf16*>(c.normed) + row * kHeadHidden) +
                   threadIdx.x);
  }
  rank(c.scores + static_cast<int64_t>(row) * kCentroids, shared);
  if (brings_x) {
    reinterpret_cast<uint4*>(shared.x)[threadIdx.x] = x;
  }
  __syncthreads();
  const int parts = kActive * (c.size / kPartTokens) / gridDim.x, first = blockIdx.x * parts;
  logits_of_parts(c, row, first + threadIdx.x / 32, first + parts, shared);
}

}  // namespace

int launch_candidates(const Candidates& c, bool early, void* stream) {
  // About as many blocks as there are SMs: each ranks for itself, and more would rank more often.
  int blocks = 16;
  while (blocks > 1 && blocks * c.rows > 128) {
    blocks /= 2;
  }
  const dim3 grid(blocks, c.rows);
  const cudaError_t error = share_memory(rank_candidates, 0);
  return static_cast<int>(error ? error : launch_kernel(rank_candidates, c, grid, kThreads, 0, {early}, stream));
}

}  // namespace mtp::cuda
