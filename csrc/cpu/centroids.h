// The candidates of a centroid head: the tokens of each row's best centroids, and their logits.
#pragma once

#include "heads.h"

namespace mtp::cpu {

struct CentroidHead {
  LeadingRows rows;
  int type;
  const char* centroids;  // [num_centroids, hidden]
  int64_t centroid_stride;
  int64_t num_centroids;
  IndexView<1> token_ordering;  // [vocab]
  const char* weight;           // [vocab, hidden]
  int64_t weight_stride;
  int64_t vocab;
  int64_t num_active;
  int64_t size;  // tokens of a centroid
  bool centroid_ordered;
  std::vector<int64_t> never;  // suppressed token ids

  CentroidHead(const Tensor& normed, const Tensor& centroid_weight, const Tensor& ordering,
               const Tensor& lm_head_weight, int64_t active, bool ordered, const std::optional<Tensor>& suppress_ids);

  int64_t candidates() const { return num_active * size; }

  // Rows [begin, end), at most kHeadRows of them: logits and ids [end - begin, candidates()], the best centroid first.
  // The ids are those of the tokens, clamped to the vocabulary; the logit of a suppressed one is -inf.
  void candidates_of(int64_t begin, int64_t end, float* logits, int64_t* ids) const;
};

}  // namespace mtp::cpu
