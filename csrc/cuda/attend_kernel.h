// draft_attention over caches of 256 or 512 elements a key, for 16 queries at most: the first kernel, whose chunks or
// folds of chunks a merge follows (triton_ops/_attention_merge.py, merge.h).
//
// Blocks live as long as the launch. All parts of all requests lie in a row, and each block has an equal share of it
// for one KV head; the blocks of other heads have the same share, so that what lies side by side in memory is read at
// the same time. A block's keys stream through shared memory: where a launch starts early they fill it before the
// queries are there.
//
// A tile is 32 keys, or 64 (Shape). Each warp multiplies 16 of the keys by all their depth, or half of it; they hand
// each other the sums through shared memory, and then all compute the same maxima and exponentials, so that one barrier
// a tile is enough; of the values each has some of the columns. So a warp loads for itself alone what it reads.
//
// A part is a chunk, a fold of chunks, or two folds: the merge folds neighbours first, so that their sum is the same
// wherever they meet. Chunks are a request's own: which block has one, and what else it has, changes no bit.
#pragma once

#include <type_traits>

#include "attend_queries.h"
#include "attend_stream.h"
#include "attend_sums.h"

namespace mtp::cuda {
namespace {

constexpr int kSteps = kAttendDepth / 16;

enum class Part { kChunk, kFold, kTwoFolds };

// Of 16 queries a block has most of an SM. Where parts are chunks, which are few, it leaves so much that a program of
// the merge is there before the block has ended: the first 8 queries, which are in registers by then, lie under the
// scores.
template <class S, Part kPart>
struct AttendShared {
  static constexpr bool kLeavesRoom = S::kTiles == 2 && kPart == Part::kChunk;
  static constexpr int kRegisters = kLeavesRoom ? 192 : S::kRegisters;

  using Scores = float[S::kDepths][S::kQueries][S::kKeys + 8];
  using Query = bf16[S::kDim + 8];
  using Folded = float[S::kDim + 4];
  static constexpr int kQueriesAt = 2 * sizeof(Scores) - (kLeavesRoom ? 8 * sizeof(Query) : 0);
  static constexpr int kQueryBytes = S::kQueries * sizeof(Query);
  static_assert(S::kFoldsInShared * sizeof(Folded) <= kQueryBytes);

  unsigned char ring[S::kWarps][kRing][kShareBytes];
  Unit units[S::kWarps][kUnitsAhead];
  alignas(16) unsigned char rest[kQueriesAt + kQueryBytes];

  // For one tile and the next.
  __device__ __forceinline__ Scores& scores(int tile) { return reinterpret_cast<Scores*>(rest)[tile & 1]; }
  // Of a row that is the only one, before there are scores.
  __device__ __forceinline__ float2& turn(int pair) { return reinterpret_cast<float2*>(rest)[pair]; }
  __device__ __forceinline__ bf16* query(int query, int column) {
    return reinterpret_cast<Query*>(rest + kQueriesAt)[query] + column;
  }
  __device__ __forceinline__ Folded* folds() { return reinterpret_cast<Folded*>(rest + kQueriesAt); }
};

// Four warps share the turns of a row that is the only one, for which they wait for each other; else each has its own.
template <class S, class Shared>
__device__ __forceinline__ void load(const Attend& a, int b, int head, bool waits, Shared& shared) {
  if (S::kTiles == 1 && a.rows == 1) {
    load_row<S>(a, b, head, waits, shared);
  } else {
    load_rows<S>(a, b, head, waits, shared);
  }
  S::sync();
}

template <class S, Part kPart>
__global__ void __maxnreg__((AttendShared<S, kPart>::kRegisters)) attend(const __grid_constant__ Attend a) {
  constexpr int kTiles = S::kTiles, kKeys = S::kKeys;
  constexpr bool kFolds = kPart != Part::kChunk, kTwoFolds = kPart == Part::kTwoFolds;
  constexpr int kHeld = kTwoFolds ? 0 : 1;  // tiles of queries that are in registers: there is no room for more
  extern __shared__ __align__(128) unsigned char memory[];
  using Shared = AttendShared<S, kPart>;
  auto& shared = *reinterpret_cast<Shared*>(memory);
  let_others_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = static_cast<int>(blockIdx.x) % a.kv_heads;
  const int depth = warp / S::kSixteens, sixteen = warp % S::kSixteens;
  Stream<S> stream(a, head, shared.units[warp], shared.ring[warp]);
  // Of ldmatrix: where in a share a lane's row begins. Its neighbours in depth or columns, four of them, are where
  // `i * 32` is exclusive-ored into that: the share lies at a multiple of 128.
  const uint32_t key_at = lane % 16 * 512 + ((lane / 16 ^ (lane & 7)) * 16);
  const uint32_t value_at = (lane / 16 * 8 + lane % 8) * S::kColumns * 2 + ((lane / 8 % 2 ^ (lane & 7)) * 16);
  const uint32_t query_at = shared_address(shared.query(lane % 8, depth * kAttendDepth + lane / 8 * 8));
  const Unit* unit = nullptr;
  int of = -1;                   // whose queries there are
  unsigned key = 0, end = 0;     // first of the tile, and behind the last of the unit
  unsigned chunk_end, fold_end;  // of those that the tile is in
  bool first, first_fold;        // whether that is the first chunk of a fold, and the first fold of a part
  float scale;
  uint32_t q[kSteps / 2][4];  // of the first 8 queries
  Sums<S> sums;
  constexpr bool kInShared = S::kFoldsInShared > 0;
  Fold<S, std::conditional_t<kInShared, InShared<S>, InRegisters<S>>> fold;
  Fold<S, InRegisters<S>> folds;
  if constexpr (kInShared) {
    fold.y = {shared.folds(), a.rows * a.group};
  }

  // One place in the program for each push: what is not in the instruction cache costs more than it takes.
#pragma unroll 1
  for (int tile = -(kRing + 1) / 2, number = 0;; ++tile, key += kKeys) {
    auto& scores = shared.scores(tile);
    if (tile >= 0) {
      if (key >= end || tile == 0) {
        unit = &shared.units[warp][number++ % kUnitsAhead];
        if (unit->b < 0) {
          if (tile == 0) {
            wait_for_others();  // who ends before those in front would let the next kernel run too soon
          }
          return;
        }
        if (unit->b != of) {
          of = unit->b;
          load<S>(a, of, head, tile == 0, shared);
#pragma unroll
          for (int pair = 0; pair < kSteps / 2 * kHeld; ++pair) {
            load_matrices(q[pair], query_at + pair * 64);
          }
          if constexpr (Shared::kLeavesRoom) {
            __syncthreads();
          }
          scale = a.sm_scale * (a.k_scale == nullptr ? 1.0f : a.k_scale[head * a.k_scale_stride]) * kLog2E;
        }
        key = unit->begin;
        end = unit->end;
        chunk_end = key + unit->chunk;
        fold_end = key + unit->chunk * (a.chunks_a_part / 2);
        first = first_fold = true;
        sums.clear();
      }
      const uint32_t from = stream.pop();
      float s[kTiles][2][4] = {};
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t queries[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (t < kHeld) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              queries[t][k] = q[pair][k];
            }
          } else {
            load_matrices(queries[t], query_at + t * 8 * sizeof(typename Shared::Query) + pair * 64);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t k[4];
          load_matrices(k, (from + key_at + pair / 2 * 128) ^ ((2 * pair + i) % 4 * 32));
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
          scores[depth][t * 8 + lane % 4 * 2 + k % 2][sixteen * 16 + k / 2 * 8 + lane / 4] = s[t][0][k] + s[t][1][k];
        }
      }
    }
    stream.push_values(a);
    if (tile >= 0) {
      __syncthreads();
      constexpr int kEights = kKeys / 8;
      uint32_t p[kTiles][kEights];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float s[2 * kEights];
        float top = sums.top[t];
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const int column = lane % 4 * 2 + 8 * j;
          float2 one = *reinterpret_cast<const float2*>(&scores[0][t * 8 + lane / 4][column]);
          if constexpr (S::kDepths == 2) {
            const float2 two = *reinterpret_cast<const float2*>(&scores[1][t * 8 + lane / 4][column]);
            one = make_float2(one.x + two.x, one.y + two.y);
          }
          s[2 * j] = key + column < end ? one.x * scale : -INFINITY;
          s[2 * j + 1] = key + column + 1 < end ? one.y * scale : -INFINITY;
          top = fmaxf(top, fmaxf(s[2 * j], s[2 * j + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
        const float shrink = exp2_approx(sums.top[t] - top);
        sums.top[t] = top;
#pragma unroll
        for (int j = 0; j < 2 * kEights; ++j) {
          s[j] = exp2_approx(s[j] - top);
        }
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          p[t][j] = pack(s[2 * j], s[2 * j + 1]);
        }
        sums.total[t] = __fmaf_rn(sums.total[t], shrink, sum_of(s));
        if (__any_sync(kAll, shrink != 1.0f)) {
          const float2 factors = for_averages(shrink);
#pragma unroll
          for (int slab = 0; slab < S::kSlabs; ++slab) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              sums.y.at(t, slab, k) *= k % 2 == 0 ? factors.x : factors.y;
            }
          }
        }
      }
      const uint32_t from = stream.pop();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
        for (int slab = 0; slab < S::kSlabs; ++slab) {
          uint32_t v[4];
          load_turned(v, (from + value_at + slab / 4 * 128 + step * 16 * S::kColumns * 2) ^ (slab % 4 * 32));
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply(sums.y.y[t][slab], v[0], v[1], v[2], v[3], p[t][2 * step], p[t][2 * step + 1]);
          }
        }
      }
      const bool last = key + kKeys >= end;
      if (last || key + kKeys == chunk_end) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          sums.total[t] += __shfl_xor_sync(kAll, sums.total[t], 1);
          sums.total[t] += __shfl_xor_sync(kAll, sums.total[t], 2);
        }
        if constexpr (kFolds) {
          fold_in(fold, sums, first);
          first = false;
          chunk_end += unit->chunk;
          sums.clear();
        }
      }
      if constexpr (kTwoFolds) {
        if (last || key + kKeys == fold_end) {
          fold_in(folds, fold, first_fold);
          first = true;
          first_fold = false;
        }
      }
      if (last) {
        if constexpr (kTwoFolds) {
          leave<S>(a, head, *unit, folds);
        } else if constexpr (kFolds) {
          leave<S>(a, head, *unit, fold);
        } else {
          leave<S>(a, head, *unit, sums);
        }
      }
    }
    stream.push_keys(a);
  }
}

// `use` gets the kernel that serves a launch, its threads and its bytes of shared memory: an SM has room for two blocks
// of 8 queries, or one of 16. Two folds a part are served for more than 4 queries of heads of 512.
template <class Use>
auto with_kernel(const Attend& a, Use use) {
  const auto of = [&](auto shape) {
    using S = decltype(shape);
    const auto part = [&](auto kernel, size_t bytes) { return use(kernel, S::kThreads, static_cast<int>(bytes)); };
    if constexpr (!S::kBesideSegments) {
      if (a.folds_a_part == 2) {
        return part(attend<S, Part::kTwoFolds>, sizeof(AttendShared<S, Part::kTwoFolds>));
      }
    }
    return a.chunks_a_part > 1 ? part(attend<S, Part::kFold>, sizeof(AttendShared<S, Part::kFold>))
                               : part(attend<S, Part::kChunk>, sizeof(AttendShared<S, Part::kChunk>));
  };
  const int queries = a.rows * a.group;
  return a.head_dim == 256 ? of(Shape<256, 4, 8>())
         : queries <= 4    ? of(Shape<512, 4, 4>())
         : queries <= 8    ? of(Shape<512, 4, 8>())
                           : of(Shape<512, 8, 16>());
}

}  // namespace
}  // namespace mtp::cuda
