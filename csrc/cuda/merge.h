// The chunks of draft_attention, merged: the place of its second kernel (triton_ops/_attention_merge.py).
#pragma once

#include "chunks.h"
#include "mail.h"
#include "queue.h"
#include "segment.h"

namespace mtp::cuda {

// The arithmetic of a fold is that of the kernel that folds its chunks itself.
__device__ __forceinline__ void fold_in(float& top, float& total, float (&y)[4], float new_top, float new_total,
                                        const float4& more) {
  const Shrinks shrinks = fold_sums(top, total, new_top, new_total);
  y[0] = fold_average(y[0], more.x, shrinks);
  y[1] = fold_average(y[1], more.y, shrinks);
  y[2] = fold_average(y[2], more.z, shrinks);
  y[3] = fold_average(y[3], more.w, shrinks);
}

// The keys of a row's request.
__device__ __forceinline__ int64_t length_of(const Attention& a, int row) {
  const int request = a.rows_each == 1 ? row : row / a.rows_each;
  return a.lengths_are_int64 ? static_cast<const int64_t*>(a.seq_lens)[request]
                             : static_cast<const int32_t*>(a.seq_lens)[request];
}

// The chunks that a request's visible keys are cut into.
__device__ __forceinline__ int count_chunks(const Attention& a, int64_t length) {
  const int visible = static_cast<int>(min(min(max(length, int64_t{0}), a.capacity), a.bound));
  const int chunks = how_many(visible, keys_of_chunk(visible, a.chunk_weight, a.log2_max_chunks, a.chunk_multiple));
  return min(chunks, a.parts * a.chunks_a_part);  // as many as there are, whatever the lengths say
}

constexpr int kMostFold = 8;

// Some chunks or folds together: four elements of their average, not divided by the sum.
struct Folded {
  float top = -INFINITY;
  float total = 0.0f;
  float y[4] = {};
};

struct Loaded {
  float2 stat;
  float4 average;
};

__device__ __forceinline__ Loaded load_part(const float* stats, const float* partial, int part, int head_dim,
                                            bool live) {
  Loaded found = {make_float2(-INFINITY, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
  if (live) {
    found.stat = load_fresh(reinterpret_cast<const float2*>(stats + part * 2));
    found.average = load_fresh(reinterpret_cast<const float4*>(partial + part * head_dim));
  }
  return found;
}

__device__ __forceinline__ Folded first_of(const Loaded& part) {
  return {part.stat.x, part.stat.y, {part.average.x, part.average.y, part.average.z, part.average.w}};
}

__device__ __forceinline__ void fold_in(Folded& into, const Folded& more) {
  fold_in(into.top, into.total, into.y, more.top, more.total, make_float4(more.y[0], more.y[1], more.y[2], more.y[3]));
}

// Chunks in their order.
template <int kCount>
__device__ __forceinline__ Folded fold_chunks(const Loaded (&chunks)[kCount]) {
  Folded found = first_of(chunks[0]);
#pragma unroll
  for (int j = 1; j < kCount; ++j) {
    fold_in(found.top, found.total, found.y, chunks[j].stat.x, chunks[j].stat.y, chunks[j].average);
  }
  return found;
}

__device__ __forceinline__ void weigh(Folded& found, float best) {
  const float weight = exp2_approx(found.top - (best == -INFINITY ? 0.0f : best));
  found.total = __fmul_rn(weight, found.total);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    found.y[j] = __fmul_rn(weight, found.y[j]);
  }
}

// Where a unit's elements are: four a lane, and 2^log2_lanes lanes that share its folds.
struct Place {
  const float* partial;
  const float* stats;
  int row, head, d, chunks;
};

template <class SharedMemory>
__device__ __forceinline__ Place place_of(const Segment& s, const Group& group, int unit, const SharedMemory& shared) {
  const Attention& a = s.attention;
  const int lane = threadIdx.x % 32;
  const int place = (unit >> a.log2_units) + (group.first_row << a.log2_heads);  // row and head
  Place found;
  found.row = place >> a.log2_heads;
  found.head = place & ((1 << a.log2_heads) - 1);
  found.d = ((unit & ((1 << a.log2_units) - 1)) << (7 - a.log2_lanes)) + (lane >> a.log2_lanes) * 4;
  found.chunks = shared.chunks[found.row - group.first_row];
  found.partial = a.partial + static_cast<int64_t>(place * a.parts) * a.head_dim + found.d;
  found.stats = a.stats + place * a.parts * 2;
  return found;
}

// What lanes have of a unit's folds, added over them, goes to the mail.
__device__ __forceinline__ void post_unit(const Segment& s, const Place& place, Folded sum, uint32_t epoch) {
  const int lanes = 1 << s.attention.log2_lanes;
  float best = sum.top;
#pragma unroll 1
  for (int i = 1; i < lanes; i *= 2) {
    best = fmaxf(best, __shfl_xor_sync(kAll, best, i));
  }
  weigh(sum, best);
#pragma unroll 1
  for (int i = 1; i < lanes; i *= 2) {
    sum.total += __shfl_xor_sync(kAll, sum.total, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.y[j] += __shfl_xor_sync(kAll, sum.y[j], i);
    }
  }
  if ((threadIdx.x % 32 & (lanes - 1)) == 0) {
    const Attention& a = s.attention;
    const float v_scale = a.v_scale == nullptr ? 1.0f : a.v_scale[(place.head >> a.log2_group) * a.v_scale_stride];
    const float factor = place.chunks > 0 ? __fdiv_rn(v_scale, sum.total) : 0.0f;
    uint64_t* to = s.mail_attended + (place.row * s.attended_columns + place.head * a.head_dim + place.d) / 2;
    post(to, word(pack(sum.y[0] * factor, sum.y[1] * factor), epoch),
         word(pack(sum.y[2] * factor, sum.y[3] * factor), epoch));
  }
}

template <class SharedMemory>
__device__ __forceinline__ void merge_chunks(const Segment& s, const Group& group, int unit, uint32_t epoch,
                                             const SharedMemory& shared) {
  const Attention& a = s.attention;
  const int lanes = 1 << a.log2_lanes;
  const Place place = place_of(s, group, unit, shared);
  const int folds = (place.chunks + a.fold - 1) >> a.log2_fold;
  Folded sum;
#pragma unroll 1
  for (int fold = threadIdx.x % 32 & (lanes - 1); fold < folds; fold += lanes) {
    const int first = fold << a.log2_fold;
    const auto load = [&](int j) {
      return load_part(place.stats, place.partial, first + j, a.head_dim, j < a.fold && first + j < place.chunks);
    };
    if (a.fold > kMostFold / 2) {
      Loaded chunks[kMostFold];
#pragma unroll
      for (int j = 0; j < kMostFold; ++j) {
        chunks[j] = load(j);
      }
      fold_in(sum, fold_chunks(chunks));
    } else {
      Loaded chunks[kMostFold / 2];
#pragma unroll
      for (int j = 0; j < kMostFold / 2; ++j) {
        chunks[j] = load(j);
      }
      fold_in(sum, fold_chunks(chunks));
    }
  }
  post_unit(s, place, sum, epoch);
}

// Attention has folded its chunks. Of many rows a warp has several units, whose loads are in flight together.
template <int kUnits, class SharedMemory>
__device__ __forceinline__ void merge_folds(const Segment& s, const Group& group, int first_unit, int units,
                                            uint32_t epoch, const SharedMemory& shared) {
  const Attention& a = s.attention;
  const int lanes = 1 << a.log2_lanes;
  const int step = kWarps * group.blocks;
  Place places[kUnits];
  Folded sums[kUnits];
  int most = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    places[u] = place_of(s, group, min(first_unit + u * step, units - 1), shared);
    most = max(most, (places[u].chunks + a.fold - 1) >> a.log2_fold);
  }
#pragma unroll 1
  for (int fold = threadIdx.x % 32 & (lanes - 1); fold < most; fold += lanes) {
    Loaded found[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      found[u] =
          load_part(places[u].stats, places[u].partial, fold, a.head_dim, fold << a.log2_fold < places[u].chunks);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      fold_in(sums[u], first_of(found[u]));
    }
  }
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (first_unit + u * step < units) {
      post_unit(s, places[u], sums[u], epoch);
    }
  }
}

// Where one part was all, attention has its result already.
__device__ __forceinline__ void pass_on(const Segment& s, const Group& group, int unit, uint32_t epoch) {
  const int lane = threadIdx.x % 32;
  if (lane < 2) {
    const int64_t at = static_cast<int64_t>(group.first_row) * s.attended_columns + unit * 8 + lane * 4;
    const uint2 found = load_fresh(reinterpret_cast<const uint2*>(static_cast<const bf16*>(s.attention.attended) + at));
    post(s.mail_attended + at / 2, word(found.x, epoch), word(found.y, epoch));
  }
}

// kUnits: of a warp at a time, where attention has folded its chunks.
template <int kUnits, class SharedMemory>
__device__ __forceinline__ void merge(const Segment& s, const Group& group, uint32_t epoch,
                                      const SharedMemory& shared) {
  const Attention& a = s.attention;
  const bool merges = a.partial != nullptr;
  const bool folded = a.chunks_a_part == a.fold;
  const int units = group.rows * s.attended_columns >> (merges ? 7 - a.log2_lanes : 3);
  const int first = group.block + static_cast<int>(threadIdx.x) / 32 * group.blocks, step = kWarps * group.blocks;
  if (merges && folded) {
#pragma unroll 1
    for (int unit = first; unit < units; unit += kUnits * step) {
      merge_folds<kUnits>(s, group, unit, units, epoch, shared);
    }
    return;
  }
#pragma unroll 1
  for (int unit = first; unit < units; unit += step) {
    if (merges) {
      merge_chunks(s, group, unit, epoch, shared);
    } else {
      pass_on(s, group, unit, epoch);
    }
  }
}

}  // namespace mtp::cuda
