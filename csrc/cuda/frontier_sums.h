// What frontier_kernel.h makes of a chunk, folds of them, and what it leaves to the merge.
#pragma once

#include "attend_sums.h"
#include "frontier_sizes.h"

namespace mtp::cuda {
namespace {

// Of a fold, or of no key yet: maxima and sums of a lane's queries, lane / 4 of the warp's 16 and that 8 below.
struct Best {
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {};

  // The sums of a chunk, complete, into the fold.
  __device__ __forceinline__ void take(const Best& chunk, Shrinks (&shrinks)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shrinks[i] = fold_sums(top[i], total[i], chunk.top[i], chunk.total[i]);
    }
  }
};

// A lane's averages of its warpgroup's columns, not divided by the sums: of each eight of columns lane % 4 * 2 and the
// next of the upper query, then of the lower.
template <class F>
struct FrontierAverages {
  float y[F::kSlabs][64];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < F::kSlabs; ++h) {
#pragma unroll
      for (int j = 0; j < 64; ++j) {
        y[h][j] = 0.0f;
      }
    }
  }

  // Nothing that uses them moves to the other side of this.
  __device__ __forceinline__ void pin_all() {
#pragma unroll
    for (int h = 0; h < F::kSlabs; ++h) {
      pin(y[h]);
    }
  }

  // With maxima and sums to where the merge finds them, of queries from `first` on.
  __device__ __forceinline__ void leave(const Attend& a, const Unit& unit, int first, const Best& best) const {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = first + i * 8 + lane / 4;
      if (query < a.rows * a.group) {
        const int64_t line = line_of(a, F::head(a), unit, query);
        if (half + F::column_block() == 0 && lane % 4 == 0) {
          *reinterpret_cast<float2*>(a.stats + line * 2) = make_float2(best.top[i], best.total[i]);
        }
        float* at = a.partial + line * F::kDim + (F::column_block() * 2 + half * F::kSlabs) * 128 + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < F::kSlabs; ++h) {
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            store_for_next(at + h * 128 + j * 8, make_float2(y[h][j * 4 + i * 2], y[h][j * 4 + i * 2 + 1]));
          }
        }
      }
    }
  }
};

// Of a chunk. A lane's sums are of its own keys alone until they are complete.
template <class F>
struct FrontierSums {
  Best best;
  FrontierAverages<F> averages;

  __device__ __forceinline__ void clear() {
    best = {};
    averages.clear();
  }

  // Scores become weights, in pairs: of a tile whose first key is `key`, of which those before `end` are seen. The rows
  // of a fold have none.
  __device__ __forceinline__ void weigh(float (&s)[F::kScores], float scale, unsigned key, unsigned end, bool is_fold,
                                        uint32_t (&p)[F::kWeights]) {
    const int lane = threadIdx.x % 32;
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = best.top[i];
#pragma unroll
      for (int j = 0; j < F::kKeys / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& x = s[j * 4 + i * 2 + k];
          x = key + j * 8 + lane % 4 * 2 + k < end ? x * scale : -INFINITY;
          top = fmaxf(top, x);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
      shrink[i] = is_fold ? 1.0f : exp2_approx(best.top[i] - top);
      best.top[i] = top;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < F::kKeys / 8; ++j) {
        const float one = exp2_approx(s[j * 4 + i * 2] - top), two = exp2_approx(s[j * 4 + i * 2 + 1] - top);
        sum += one + two;
        p[j * 2 + i] = is_fold ? 0 : pack(one, two);
      }
      best.total[i] = __fmaf_rn(best.total[i], shrink[i], sum);
    }
    if (__any_sync(kAll, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int h = 0; h < F::kSlabs; ++h) {
#pragma unroll
        for (int j = 0; j < 64; ++j) {
          averages.y[h][j] *= shrink[j / 2 % 2];
        }
      }
    }
  }

  __device__ __forceinline__ void complete() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best.total[i] += __shfl_xor_sync(kAll, best.total[i], 1);
      best.total[i] += __shfl_xor_sync(kAll, best.total[i], 2);
    }
  }

  // A chunk, complete, into the fold that the warp has in registers of its own; nothing is left of it.
  __device__ __forceinline__ void fold_into(Best& all_best, FrontierAverages<F>& all) {
    Shrinks shrinks[2];
    all_best.take(best, shrinks);
#pragma unroll
    for (int h = 0; h < F::kSlabs; ++h) {
#pragma unroll
      for (int j = 0; j < 64; ++j) {
        all.y[h][j] = fold_average(all.y[h][j], averages.y[h][j], shrinks[j / 2 % 2]);
      }
    }
    clear();
  }

  // A chunk, complete, from one warp of a pair to the one that has the fold where its own would be; nothing is left of
  // it. Both warps take the same way, as those who wait for products have to.
  __device__ __forceinline__ void hand_over(FrontierShared& shared, int pair, bool is_fold, Best& all_best) {
    const int lane = threadIdx.x % 32;
    Shrinks shrinks[2];
#pragma unroll
    for (int h = 0; h < F::kSlabs; ++h) {
      float (&y)[64] = averages.y[h];
      F::sync_pair(pair);  // what was there is read
      if (!is_fold) {
        if (h == 0) {
          shared.handed[pair][lane] = {best.top[0], best.top[1], best.total[0], best.total[1]};
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          *shared.averages(pair, i, lane) = {y[i * 4], y[i * 4 + 1], y[i * 4 + 2], y[i * 4 + 3]};
        }
      }
      F::sync_pair(pair);
      if (h == 0) {
        const float4 handed = shared.handed[pair][lane];
        all_best.take({{handed.x, handed.y}, {handed.z, handed.w}}, shrinks);
        best = {};
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i % 4 == 0) {
          pin(y);  // no more loads at a time than there are registers for
        }
        const float4 found = *shared.averages(pair, i, lane);
        const float more[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float sum = fold_average(y[i * 4 + k], more[k], shrinks[k / 2]);
          y[i * 4 + k] = is_fold ? sum : 0.0f;
        }
      }
    }
  }
};

}  // namespace
}  // namespace mtp::cuda
