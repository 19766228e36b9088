// draft_attention over caches of 512 elements a key, for 16 queries at most: the first kernel, whose chunks or folds of
// chunks a merge follows (triton_ops/_attention_merge.py, merge.h).
//
// Blocks live as long as the launch. All parts of all requests lie in a row, and each block has an equal share of it
// for one KV head; the blocks of other heads have the same share, so that what lies side by side in memory is read at
// the same time. A block's keys stream through shared memory: where a launch starts early they fill it before the
// queries are there.
//
// A tile is 32 keys. The four warps multiply, each, 16 of the keys by half of their depth, hand each other the sums
// through shared memory, and then all compute the same maxima and exponentials, so that one barrier a tile is enough;
// of the values each has a quarter of the columns. So a warp loads for itself alone what it reads.
//
// Chunks are a request's own: which block has one, and what else it has, changes no bit.
#pragma once

#include <algorithm>
#include <cstddef>

#include "attend_queries.h"
#include "attend_stream.h"
#include "attend_sums.h"

namespace mtp::cuda {
namespace {

constexpr int kSteps = 16;  // of a depth of 16 in a warp's half of the queries
constexpr float kLog2E = 1.4426950408889634f;

// Queries, and averages of a fold of chunks, of as many queries as there are. 8 queries go into registers before there
// are folds; 16 stay where they are.
template <int kTiles>
struct QueriesAndFolds {
  bf16 q[8 * kTiles][kAttendDim + 8];
  float folds[1][kAttendDim + 4];
};

template <>
struct QueriesAndFolds<1> {
  union {
    bf16 q[8][kAttendDim + 8];
    float folds[1][kAttendDim + 4];
  };
};

// kTiles: of 8 queries. kRing: shares of K and V that a warp has on the way, in turn.
template <int kTiles, int kRing>
struct AttendShared {
  unsigned char ring[kAttendWarps][kRing][kShareBytes];
  Unit units[kAttendWarps][units_ahead(kRing)];
  union {
    float scores[2][2][8 * kTiles][kAttendKeys + 8];  // of either half of the depth, for one tile and the next
    float2 turns[kAttendDim / 2];                     // of queries that are one row
  };
  bf16 norm[kAttendDim];
  QueriesAndFolds<kTiles> last;
};

template <int kTiles, int kRing, bool kFolds>
__global__ void __launch_bounds__(kAttendThreads, kTiles == 1 ? 3 : 2) attend(const __grid_constant__ Attend a) {
  static_assert(kRing % 2 == 1, "values are pushed when keys have been read");
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<AttendShared<kTiles, kRing>*>(memory);
  let_others_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = static_cast<int>(blockIdx.x) % a.kv_heads;
  Stream<kRing> stream(a, head, shared.units[warp], shared.ring[warp]);
  if (a.norm != nullptr) {
    *reinterpret_cast<uint2*>(&shared.norm[threadIdx.x * 4]) =
        __ldg(reinterpret_cast<const uint2*>(a.norm) + threadIdx.x);
  }
  // Of ldmatrix: where in a share a lane's row begins, for each of four neighbours in depth or columns.
  uint32_t key_at[4], value_at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    key_at[i] = lane % 16 * 512 + (((2 * i + lane / 16) ^ (lane & 7)) * 16);
    value_at[i] = (lane / 16 * 8 + lane % 8) * 256 + (((2 * i + lane / 8 % 2) ^ (lane & 7)) * 16);
  }
  const uint32_t query_at = shared_address(&shared.last.q[lane % 8][warp / 2 * (kAttendDim / 2) + lane / 8 * 8]);
  const Unit* unit = nullptr;
  int of = -1;                // whose queries there are
  unsigned key = 0, end = 0;  // first of the tile, and behind the last of the unit
  unsigned chunk_end;         // of the chunk that the tile is in
  bool first;                 // whether that is the first of a fold
  float scale;
  uint32_t q[kSteps / 2][4];  // of 8 queries
  Sums<kTiles> sums;
  Fold<kTiles> fold;

  // One place in the program for each push: what is not in the instruction cache costs more than it takes.
#pragma unroll 1
  for (int tile = -(kRing + 1) / 2, number = 0;; ++tile, key += kAttendKeys) {
    float (*const scores)[8 * kTiles][kAttendKeys + 8] = shared.scores[tile & 1];
    if (tile >= 0) {
      if (key >= end || tile == 0) {
        unit = &shared.units[warp][number++ % units_ahead(kRing)];
        if (unit->b < 0) {
          if (tile == 0) {
            wait_for_others();  // who ends before those in front would let the next kernel run too soon
          }
          return;
        }
        if (unit->b != of) {
          of = unit->b;
          load_queries<kTiles>(a, of, head, tile == 0, shared);
          if constexpr (kTiles == 1) {
#pragma unroll
            for (int pair = 0; pair < kSteps / 2; ++pair) {
              load_matrices(q[pair], query_at + pair * 64);
            }
          }
          scale = a.sm_scale * (a.k_scale == nullptr ? 1.0f : a.k_scale[head * a.k_scale_stride]) * kLog2E;
        }
        key = unit->begin;
        end = unit->end;
        chunk_end = key + unit->chunk;
        first = true;
        sums.clear();
      }
      const uint32_t from = stream.pop();
      float s[kTiles][2][4] = {};
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t queries[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if constexpr (kTiles == 1) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              queries[t][k] = q[pair][k];
            }
          } else {
            load_matrices(queries[t], query_at + t * 8 * sizeof(shared.last.q[0]) + pair * 64);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t k[4];
          load_matrices(k, from + key_at[(2 * pair + i) % 4] + pair / 2 * 128);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply(s[t][i], k[0], k[1], k[2], k[3], queries[t][2 * i], queries[t][2 * i + 1]);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          scores[warp / 2][t * 8 + lane % 4 * 2 + k % 2][warp % 2 * 16 + k / 2 * 8 + lane / 4] =
              s[t][0][k] + s[t][1][k];
        }
      }
    }
    stream.push_values(a);
    if (tile >= 0) {
      __syncthreads();
      uint32_t p[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float s[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = lane % 4 * 2 + 8 * j;
          const float2 one = *reinterpret_cast<const float2*>(&scores[0][t * 8 + lane / 4][column]);
          const float2 two = *reinterpret_cast<const float2*>(&scores[1][t * 8 + lane / 4][column]);
          s[2 * j] = key + column < end ? (one.x + two.x) * scale : -INFINITY;
          s[2 * j + 1] = key + column + 1 < end ? (one.y + two.y) * scale : -INFINITY;
        }
        float top = fmaxf(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), fmaxf(fmaxf(s[4], s[5]), fmaxf(s[6], s[7])));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
        top = fmaxf(top, sums.top[t]);
        const float shrink = exp2_approx(sums.top[t] - top);
        sums.top[t] = top;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          s[j] = exp2_approx(s[j] - top);
        }
        sums.total[t] =
            __fmaf_rn(sums.total[t], shrink, ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[t][j] = pack(s[2 * j], s[2 * j + 1]);
        }
        if (__any_sync(kAll, shrink != 1.0f)) {
          const float2 factors = for_averages(shrink);
#pragma unroll
          for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              sums.y[t][slab][k] *= k % 2 == 0 ? factors.x : factors.y;
            }
          }
        }
      }
      const uint32_t from = stream.pop();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          uint32_t v[4];
          load_turned(v, from + value_at[slab % 4] + slab / 4 * 128 + step * 16 * 256);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply(sums.y[t][slab], v[0], v[1], v[2], v[3], p[t][2 * step], p[t][2 * step + 1]);
          }
        }
      }
      const bool last = key + kAttendKeys >= end;
      if (last || key + kAttendKeys == chunk_end) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          sums.total[t] += __shfl_xor_sync(kAll, sums.total[t], 1);
          sums.total[t] += __shfl_xor_sync(kAll, sums.total[t], 2);
        }
        if constexpr (kFolds) {
          fold_chunk(fold, sums, first, a.rows * a.group, shared);
          first = false;
          chunk_end += unit->chunk;
          sums.clear();
        }
      }
      if (last) {
        if constexpr (kFolds) {
          leave<kTiles>(a, head, *unit, fold.top, fold.total, [&](int t, int slab, int k) {
            return shared.last.folds[t * 8 + lane % 4 * 2 + k % 2][column_of(slab, k / 2)];
          });
        } else {
          leave<kTiles>(a, head, *unit, sums.top, sums.total,
                        [&](int t, int slab, int k) { return sums.y[t][slab][k]; });
        }
      }
    }
    stream.push_keys(a);
  }
}

constexpr int kRingOf4 = 3, kRingOf16 = 5;  // an SM has room for two blocks of 4 queries, or one of 16

template <int kTiles, int kRing>
int bytes_of(const Attend& a, bool folds_in_shared) {
  using Shared = AttendShared<kTiles, kRing>;
  const int queries = folds_in_shared ? a.rows * a.group : 0;
  return static_cast<int>(std::max(sizeof(Shared), offsetof(Shared, last) + offsetof(QueriesAndFolds<kTiles>, folds) +
                                                       queries * sizeof(QueriesAndFolds<kTiles>::folds[0])));
}

}  // namespace
}  // namespace mtp::cuda
