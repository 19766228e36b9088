// The dense head as a program of a team: chunks of its rows, then each row's best of them.
#pragma once

#include "heads.h"

namespace mtp::cpu {

struct LmHeadTopK {
  HeadRows head;
  TopK top;
  std::vector<int64_t> never;     // suppressed token ids
  LmHeadParams p{};               // but for the rows of one pass
  float* ranked = nullptr;        // [at most kHeadRows, k]
  int64_t* ranked_ids = nullptr;  // the same

  LmHeadTopK(Rows normed, const Tensor& weight, const Tensor* weight_scale, const Tensor* token_map,
             int64_t vocab_start, double logits_soft_cap, std::vector<int64_t> suppressed_ids, TopK results);

  int64_t products() const { return head.rows.count * head.rows.columns * p.vocab; }
  void place(Carver& carver);
  void run(Member& member) const;
};

}  // namespace mtp::cpu
