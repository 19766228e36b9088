// The centroid head as a program of a team: the tokens of each row's best centroids, and their logits.
#pragma once

#include "heads.h"

namespace mtp::cpu {

struct CentroidHead {
  HeadRows head;
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

  // Of at most kHeadRows rows:
  float* scores = nullptr;        // [rows, num_centroids]
  float* chosen_score = nullptr;  // [rows, num_active]
  int64_t* chosen = nullptr;      // [rows, num_active], the best centroid first

  CentroidHead(Rows normed, const Tensor& centroid_weight, const Tensor& ordering, const Tensor& lm_head_weight,
               int64_t active, bool ordered, const std::optional<Tensor>& suppress_ids = std::nullopt);

  int64_t candidates() const { return num_active * size; }
  int64_t products() const { return head.rows.count * head.rows.columns * (num_centroids + candidates()); }
  void place(Carver& carver);

  // Rows [begin, end), at most kHeadRows of them: logits and ids [end - begin, candidates()], the best centroid first.
  // The ids are those of the tokens, clamped to the vocabulary; the logit of a suppressed one is -inf.
  void candidates_of(Member& member, int64_t begin, int64_t end, float* logits, int64_t* ids) const;
};

struct CentroidTopK {
  CentroidHead head;
  TopK top;
  float* logits = nullptr;      // [at most kHeadRows, candidates]
  int64_t* ids = nullptr;       // the same
  float* best = nullptr;        // [at most kHeadRows, k]
  int64_t* best_ids = nullptr;  // the same

  CentroidTopK(CentroidHead centroid_head, TopK results) : head(std::move(centroid_head)), top(results) {}

  int64_t products() const { return head.products(); }
  void place(Carver& carver);
  void run(Member& member) const;
};

}  // namespace mtp::cpu
