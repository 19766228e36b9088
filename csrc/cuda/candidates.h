// The candidates of a centroid head, ranked for a chain: see candidates_kernel.h.
#pragma once

#include <cstdint>

namespace mtp::cuda {

constexpr int kCentroids = 2048;
constexpr int kActive = 32;  // centroids whose tokens are candidates
constexpr int kHeadHidden = 256;
constexpr int kPartTokens = 32;  // tokens of a part

struct Candidates {
  const float* scores = nullptr;   // [rows, kCentroids], without NaN
  const void* normed = nullptr;    // [rows, kHeadHidden] bf16
  const void* ordering = nullptr;  // [vocab] int32 or int64: token ids sorted by centroid
  bool ordering_is_int64 = false;
  const void* weight = nullptr;  // [vocab, kHeadHidden] bf16
  int64_t weight_stride = 0;
  bool ordered = false;  // whether row i of weight is token ordering[i]'s, not token i's
  int64_t vocab = 0;
  int size = 0;  // tokens of a centroid, a multiple of kPartTokens
  int rows = 0;
  // Of each part: the largest logit, with its token's id and place, and the sum of exp(logit - largest).
  float* part_values = nullptr;  // [rows, parts]
  int64_t* part_orders = nullptr;
  float* part_max = nullptr;
  float* part_sum = nullptr;
};

// 0, or the code of a CUDA error.
int launch_candidates(const Candidates& candidates, bool early, void* stream);

}  // namespace mtp::cuda
