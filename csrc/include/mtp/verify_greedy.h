// Walks a draft tree as far as the target agrees with it.
#pragma once

#include "mtp/views.h"

namespace mtp {

struct VerifyGreedyParams {
  int64_t batch;
  int64_t num_nodes;
  int64_t num_rows;  // rows of the target's result
  int64_t max_depth;

  IndexView<2> draft_ids;              // [batch, num_nodes]
  IndexView<2> retrieve_index;         // [batch, num_nodes]
  IndexView<2> retrieve_next_token;    // [batch, num_nodes]
  IndexView<2> retrieve_next_sibling;  // [batch, num_nodes]
  IndexView<2> target_ids;  // [num_rows / columns, columns]: row r of the result at (r / columns, r % columns)
  int64_t target_columns;

  int64_t* accept_index;  // [batch, max_depth + 1]
  int64_t* num_accepted;  // [batch]
  int64_t* accept_ids;    // [batch, max_depth + 1]
};

}  // namespace mtp
