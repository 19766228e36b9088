// One step of a tree: the candidates of the frontier's rows, and the k best of them as the next frontier.
#pragma once

#include "mtp/views.h"

namespace mtp {

struct TreeExpandParams {
  int64_t batch;
  int64_t rows;
  int64_t k;
  int64_t cand_offset;  // global index of this step's first candidate

  View<const float, 3> logprobs;  // [batch, rows, k]
  IndexView<3> token_ids;         // [batch, rows, k]
  View<const float, 2> scores;    // [batch, rows], or empty: 0
  IndexView<2> frontier;          // [batch, rows], or empty: -1, the root

  int64_t* next_ids;       // [batch, k]
  int64_t* row_index;      // [batch, k]
  float* next_scores;      // [batch, k]
  int64_t* next_frontier;  // [batch, k]
  float* cand_scores;      // [batch, rows * k]
  int64_t* cand_parent;    // [batch, rows * k]
};

}  // namespace mtp
