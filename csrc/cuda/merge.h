// The chunks of draft_attention, merged: the place of its second kernel (triton_ops/_attention_kernels.py).
#pragma once

#include "mail.h"
#include "queue.h"
#include "segment.h"

namespace mtp::cuda {

// The arithmetic of a fold is that of the kernel that folds its chunks itself.
__device__ __forceinline__ void fold_in(float& top, float& total, float (&y)[4], float new_top, float new_total,
                                        const float4& more) {
  const float best = fmaxf(top, new_top);
  const float base = best == -INFINITY ? 0.0f : best;
  const float shrink = exp2_approx(top - base);
  const float new_shrink = exp2_approx(new_top - base);
  total = __fmaf_rn(total, shrink, __fmul_rn(new_total, new_shrink));
  y[0] = __fmaf_rn(y[0], shrink, __fmul_rn(more.x, new_shrink));
  y[1] = __fmaf_rn(y[1], shrink, __fmul_rn(more.y, new_shrink));
  y[2] = __fmaf_rn(y[2], shrink, __fmul_rn(more.z, new_shrink));
  y[3] = __fmaf_rn(y[3], shrink, __fmul_rn(more.w, new_shrink));
  top = best;
}

// The chunks that a request's visible keys are cut into, as `chunk_size` in triton_ops/_attention_kernels.py cuts them.
__device__ __forceinline__ int count_chunks(const Attention& a, int request) {
  const int64_t length = a.lengths_are_int64 ? static_cast<const int64_t*>(a.seq_lens)[request]
                                             : static_cast<const int32_t*>(a.seq_lens)[request];
  const int visible = static_cast<int>(min(min(max(length, int64_t{0}), a.capacity), a.bound));
  int keys = static_cast<int>(ceilf(__fsqrt_rn(__fmul_rn(static_cast<float>(visible), a.chunk_weight))));
  keys = max(max(keys, (visible + (1 << a.log2_max_chunks) - 1) >> a.log2_max_chunks), 1);
  keys = (keys + a.chunk_multiple - 1) & -a.chunk_multiple;
  const int chunks = static_cast<int>(static_cast<unsigned>(visible + keys - 1) / static_cast<unsigned>(keys));
  return min(chunks, a.parts * a.chunks_a_part);  // as many as there are, whatever the lengths say
}

constexpr int kMostFold = 8;

// Elements of a head, four a lane, and 2^log2_lanes lanes that share its folds.
template <class SharedMemory>
__device__ __forceinline__ void merge_elements(const Segment& s, int unit, uint32_t epoch, const SharedMemory& shared) {
  const Attention& a = s.attention;
  const int lane = threadIdx.x % 32;
  const int lanes = 1 << a.log2_lanes;
  const int place = unit >> a.log2_units;  // row and head
  const int row = place >> a.log2_heads;
  const int head = place & ((1 << a.log2_heads) - 1);
  const int d = ((unit & ((1 << a.log2_units) - 1)) << (7 - a.log2_lanes)) + (lane >> a.log2_lanes) * 4;
  const int chunks = shared.chunks[row];
  const int folds = (chunks + a.fold - 1) >> a.log2_fold;
  const float* partial = a.partial + static_cast<int64_t>(place * a.parts) * a.head_dim + d;
  const float* stats = a.stats + place * a.parts * 2;

  float top = -INFINITY, total = 0.0f, y[4] = {};
#pragma unroll 1
  for (int fold = lane & (lanes - 1); fold < folds; fold += lanes) {
    float fold_top, fold_total, fold_y[4];
    if (a.chunks_a_part == a.fold) {
      const float2 stat = __ldcg(reinterpret_cast<const float2*>(stats + fold * 2));
      const float4 found = __ldcg(reinterpret_cast<const float4*>(partial + fold * a.head_dim));
      fold_top = stat.x, fold_total = stat.y;
      fold_y[0] = found.x, fold_y[1] = found.y, fold_y[2] = found.z, fold_y[3] = found.w;
    } else {
      const int first = fold << a.log2_fold;
      const int count = min(a.fold, chunks - first);
      const float* stat_at = stats + first * 2;
      const float* at = partial + first * a.head_dim;
      float2 stat[kMostFold];
      float4 found[kMostFold];
#pragma unroll
      for (int j = 0; j < kMostFold; ++j) {
        stat[j] = make_float2(-INFINITY, 0.0f);
        found[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (j < count) {
          stat[j] = __ldcg(reinterpret_cast<const float2*>(stat_at + j * 2));
          found[j] = __ldcg(reinterpret_cast<const float4*>(at));
        }
        at += a.head_dim;
      }
      fold_top = stat[0].x, fold_total = stat[0].y;
      fold_y[0] = found[0].x, fold_y[1] = found[0].y, fold_y[2] = found[0].z, fold_y[3] = found[0].w;
#pragma unroll
      for (int j = 1; j < kMostFold; ++j) {
        fold_in(fold_top, fold_total, fold_y, stat[j].x, stat[j].y, found[j]);
      }
    }
    fold_in(top, total, y, fold_top, fold_total, make_float4(fold_y[0], fold_y[1], fold_y[2], fold_y[3]));
  }
  float best = top;
#pragma unroll 1
  for (int i = 1; i < lanes; i *= 2) {
    best = fmaxf(best, __shfl_xor_sync(kAll, best, i));
  }
  const float weight = exp2_approx(top - (best == -INFINITY ? 0.0f : best));
  total = __fmul_rn(weight, total);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    y[j] = __fmul_rn(weight, y[j]);
  }
#pragma unroll 1
  for (int i = 1; i < lanes; i *= 2) {
    total += __shfl_xor_sync(kAll, total, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] += __shfl_xor_sync(kAll, y[j], i);
    }
  }
  if ((lane & (lanes - 1)) == 0) {
    const float v_scale = a.v_scale == nullptr ? 1.0f : a.v_scale[(head >> a.log2_group) * a.v_scale_stride];
    const float factor = chunks > 0 ? __fdiv_rn(v_scale, total) : 0.0f;
    uint64_t* to = s.mail_attended + (row * s.attended_columns + head * a.head_dim + d) / 2;
    post(to, word(pack(y[0] * factor, y[1] * factor), epoch), word(pack(y[2] * factor, y[3] * factor), epoch));
  }
}

// Where one part was all, attention has its result already.
__device__ __forceinline__ void pass_on(const Segment& s, int unit, uint32_t epoch) {
  const int lane = threadIdx.x % 32;
  if (lane < 2) {
    const int64_t at = static_cast<int64_t>(unit) * 8 + lane * 4;
    const uint2 found = __ldcg(reinterpret_cast<const uint2*>(static_cast<const bf16*>(s.attention.attended) + at));
    post(s.mail_attended + at / 2, word(found.x, epoch), word(found.y, epoch));
  }
}

template <class SharedMemory>
__device__ __forceinline__ void merge(const Segment& s, uint32_t epoch, const SharedMemory& shared) {
  const bool merges = s.attention.partial != nullptr;
  const int units = s.rows * s.attended_columns >> (merges ? 7 - s.attention.log2_lanes : 3);
#pragma unroll 1
  for (int unit = blockIdx.x + threadIdx.x / 32 * gridDim.x; unit < units; unit += kWarps * gridDim.x) {
    if (merges) {
      merge_elements(s, unit, epoch, shared);
    } else {
      pass_on(s, unit, epoch);
    }
  }
}

}  // namespace mtp::cuda
