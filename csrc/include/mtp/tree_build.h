// The best candidates of all steps as a draft tree: tokens, positions, mask and links.
#pragma once

#include "mtp/views.h"

namespace mtp {

struct TreeBuildParams {
  int64_t batch;
  int64_t num_candidates;
  int64_t num_nodes;  // the root and the num_nodes - 1 candidates that are kept

  IndexView<1> root_ids;             // [batch]
  View<const float, 2> cand_scores;  // [batch, num_candidates]
  IndexView<2> cand_ids;             // [batch, num_candidates]
  IndexView<2> cand_parent;          // [batch, num_candidates]
  IndexView<1> root_positions;       // [batch]

  int64_t* draft_ids;              // [batch, num_nodes]
  int64_t* draft_positions;        // [batch, num_nodes]
  int64_t* parents;                // [batch, num_nodes]
  int64_t* selected;               // [batch, num_nodes - 1]
  bool* tree_mask;                 // [batch, num_nodes, num_nodes]
  int64_t* retrieve_index;         // [batch, num_nodes]
  int64_t* retrieve_next_token;    // [batch, num_nodes]
  int64_t* retrieve_next_sibling;  // [batch, num_nodes]
};

}  // namespace mtp
