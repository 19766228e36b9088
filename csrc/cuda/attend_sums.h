// What attend_kernel.h makes of a chunk, folds of them, and what it leaves to the merge.
#pragma once

#include "attend_units.h"

namespace mtp::cuda {
namespace {

__device__ __forceinline__ int row_of(const Attend& a, int query) { return query * a.group_inverse >> 16; }

// A lane's averages of the queries lane % 4 * 2 and the next of each tile, of 16 columns a slab; and whether there is
// the query of t and k.
template <class S>
struct InRegisters {
  float y[S::kTiles][S::kSlabs][4];

  __device__ __forceinline__ bool has(int, int) const { return true; }
  __device__ __forceinline__ float& at(int t, int slab, int k) { return y[t][slab][k]; }
  __device__ __forceinline__ float at(int t, int slab, int k) const { return y[t][slab][k]; }
};

// A chunk: maximum and sum of the query lane / 4 of each tile, the sum of a lane's own keys alone; and averages, not
// divided by it.
template <class S>
struct Sums {
  float top[S::kTiles];
  float total[S::kTiles];
  InRegisters<S> y;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      top[t] = -INFINITY;
      total[t] = 0.0f;
#pragma unroll
      for (int slab = 0; slab < S::kSlabs; ++slab) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          y.at(t, slab, k) = 0.0f;
        }
      }
    }
  }
};

// Of a factor of the query lane / 4, those of the two queries whose averages a lane has.
__device__ __forceinline__ float2 for_averages(float factor) {
  const int lane = threadIdx.x % 4 * 8;
  return make_float2(__shfl_sync(kAll, factor, lane), __shfl_sync(kAll, factor, lane + 4));
}

// Where an average of a lane's is: of the query t * 8 + lane % 4 * 2 + i.
template <class S>
__device__ __forceinline__ int column_of(int slab, int below) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return warp * S::kColumns + slab * 16 + below * 8 + lane / 4;
}

// Of few queries, which have left room where they were.
template <class S>
struct InShared {
  float (*rows)[S::kDim + 4];
  int queries;

  static __device__ __forceinline__ int query_of(int t, int k) {
    return t * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + k % 2;
  }
  __device__ __forceinline__ bool has(int t, int k) const { return query_of(t, k) < queries; }
  __device__ __forceinline__ float& at(int t, int slab, int k) {
    return rows[query_of(t, k)][column_of<S>(slab, k / 2)];
  }
};

// Chunks together, their sums complete.
template <class S, class Averages>
struct Fold {
  float top[S::kTiles];
  float total[S::kTiles];
  Averages y;
};

// The sums of a chunk, complete, or of a fold, into those before it: the arithmetic of the merge.
template <class S, class Averages, class More>
__device__ __forceinline__ void fold_in(Fold<S, Averages>& into, const More& more, bool first) {
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
    const float best = first ? more.top[t] : fmaxf(into.top[t], more.top[t]);
    const float base = best == -INFINITY ? 0.0f : best;
    const float shrink = exp2_approx(into.top[t] - base), new_shrink = exp2_approx(more.top[t] - base);
    into.total[t] = first ? more.total[t] : __fmaf_rn(into.total[t], shrink, __fmul_rn(more.total[t], new_shrink));
    into.top[t] = best;
    const float2 one = for_averages(shrink), two = for_averages(new_shrink);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (into.y.has(t, k)) {
#pragma unroll
        for (int slab = 0; slab < S::kSlabs; ++slab) {
          float& at = into.y.at(t, slab, k);
          const float y = more.y.at(t, slab, k);
          at = first ? y : fold_average(at, y, k % 2 == 0 ? Shrinks{one.x, two.x} : Shrinks{one.y, two.y});
        }
      }
    }
  }
}

// Which line of `partial` and `stats` a query's part is.
__device__ __forceinline__ int64_t line_of(const Attend& a, int head, const Unit& unit, int query) {
  const int64_t row = static_cast<int64_t>(unit.b) * a.rows + row_of(a, query);
  const int member = query - row_of(a, query) * a.group;
  return (row * (a.kv_heads * a.group) + head * a.group + member) * a.parts + unit.part;
}

// A part to where the merge finds it.
template <class S, class Part>
__device__ __forceinline__ void leave(const Attend& a, int head, const Unit& unit, Part& part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
    const int own = t * 8 + lane / 4;
    if (warp == 0 && lane % 4 == 0 && own < a.rows * a.group) {
      *reinterpret_cast<float2*>(a.stats + line_of(a, head, unit, own) * 2) = make_float2(part.top[t], part.total[t]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = t * 8 + lane % 4 * 2 + i;
      if (query < a.rows * a.group) {
        float* at = a.partial + line_of(a, head, unit, query) * S::kDim;
#pragma unroll
        for (int slab = 0; slab < S::kSlabs; ++slab) {
          store_for_next(at + column_of<S>(slab, 0), part.y.at(t, slab, i));
          store_for_next(at + column_of<S>(slab, 1), part.y.at(t, slab, i + 2));
        }
      }
    }
  }
}

// Neighbours, then pairs of them, and so on.
template <int kCount>
__device__ __forceinline__ float sum_of(const float (&x)[kCount]) {
  if constexpr (kCount == 2) {
    return x[0] + x[1];
  } else {
    float pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      pairs[i] = x[2 * i] + x[2 * i + 1];
    }
    return sum_of(pairs);
  }
}

}  // namespace
}  // namespace mtp::cuda
