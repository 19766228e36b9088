// Walks a draft tree as far as the target accepts it, and draws one more token.
#pragma once

#include "mtp/views.h"

namespace mtp {

struct VerifySampleParams {
  int64_t batch;
  int64_t num_nodes;
  int64_t num_rows;  // of target_probs
  int64_t vocab;
  int64_t max_depth;

  IndexView<2> draft_ids;              // [batch, num_nodes]
  IndexView<2> retrieve_index;         // [batch, num_nodes]
  IndexView<2> retrieve_next_token;    // [batch, num_nodes]
  IndexView<2> retrieve_next_sibling;  // [batch, num_nodes]
  int type;                            // of the probabilities
  const char* target_probs;            // [num_rows / columns, columns, vocab]: row r at (r / columns, r % columns)
  int64_t target_columns;
  int64_t target_stride[2];
  const char* draft_probs;  // [batch, num_nodes, vocab] or null
  int64_t draft_stride[2];
  View<const float, 2> uniform;        // [batch, num_nodes]
  View<const float, 1> uniform_final;  // [batch]

  int64_t* accept_index;  // [batch, max_depth + 1]
  int64_t* num_accepted;  // [batch]
  int64_t* accept_ids;    // [batch, max_depth + 1]
};

}  // namespace mtp
