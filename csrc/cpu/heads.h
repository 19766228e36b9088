// What the launchers of the heads share: rows in fp32, and what becomes of a row's logits.
#pragma once

#include <cmath>

#include "isa.h"
#include "mtp/heads.h"
#include "rows.h"
#include "team.h"

MTP_KERNELS(HeadKernels, heads)

namespace mtp::cpu {

// Rows as the products take them: fp32, padded to kHeadPad, in the order of the weight's type.
struct HeadRows {
  Rows rows;
  int weight_type;
  float* x = nullptr;  // [at most kHeadRows, padded()]

  HeadRows(Rows from, int weight_type) : rows(std::move(from)), weight_type(weight_type) {
    STD_TORCH_CHECK(weight_type == 3 || weight_type == rows.type, "expected a weight of fp8 or of the rows' dtype");
  }

  int64_t padded() const { return (rows.columns + kHeadPad - 1) / kHeadPad * kHeadPad; }
  int64_t most() const { return std::min(rows.count, kHeadRows); }

  void place(Carver& carver) { x = carver.take<float>(most() * padded()); }

  // Rows [begin, end).
  void widen(Member& member, int64_t begin, int64_t end) const {
    constexpr int64_t kRowsPerTask = 8;
    member.each((end - begin + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
      for (int64_t r = begin + task * kRowsPerTask; r < std::min(end, begin + (task + 1) * kRowsPerTask); ++r) {
        heads().widen[rows.type](rows.at[r], rows.columns, static_cast<int>(4 / element_size(weight_type)),
                                 x + (r - begin) * padded());
      }
    });
  }
};

// Where a head leaves its results.
struct TopK {
  int64_t k;
  float* logprobs;     // [rows, k]
  int64_t* token_ids;  // [rows, k]
  float* logsumexp;    // [rows]
};

// The token ids of an optional tensor [n].
inline std::vector<int64_t> suppressed(const std::optional<Tensor>& suppress_ids) {
  std::vector<int64_t> ids;
  if (suppress_ids) {
    const IndexView<1> view = index_view<1>(*suppress_ids);
    for (int64_t i = 0; i < suppress_ids->size(0); ++i) {
      ids.push_back(view(i));
    }
  }
  return ids;
}

inline float log_of(LogSum sum) {
  return std::isinf(sum.largest) ? sum.largest : static_cast<float>(sum.largest + std::log(sum.sum));
}

// At most 0; a value of +inf is certain, and -inf stays.
inline float logprob(float value, float total) {
  return std::isinf(value) ? (value > 0 ? 0.0f : value) : std::min(value - total, 0.0f);
}

// One row's results from its k best and the log of its sum.
inline void finish_row(const TopK& top, int64_t row, const float* best, const int64_t* ids, LogSum sum) {
  const float total = log_of(sum);
  top.logsumexp[row] = total;
  for (int64_t i = 0; i < top.k; ++i) {
    top.logprobs[row * top.k + i] = logprob(best[i], total);
    top.token_ids[row * top.k + i] = ids[i];
  }
}

}  // namespace mtp::cpu
