// What a round emits: the accepted tokens up to the first stop id, and the seed of the next round.
#pragma once

#include "mtp/views.h"

namespace mtp {

struct CommitParams {
  int64_t batch;
  int64_t width;     // max_depth + 1
  int64_t num_rows;  // rows of target_hidden
  int64_t num_stop_ids;
  int64_t row_bytes;  // of one row of target_hidden: it is copied, whatever its dtype

  IndexView<2> accept_index;          // [batch, width]
  IndexView<1> num_accepted;          // [batch]
  IndexView<2> accept_ids;            // [batch, width]
  View<const char, 1> target_hidden;  // [num_rows, backbone], the stride in bytes
  IndexView<1> stop_ids;              // [num_stop_ids]

  int64_t* output_ids;  // [batch, width]
  int64_t* num_output;  // [batch]
  bool* finished;       // [batch]
  int64_t* seed_ids;    // [batch]
  char* seed_state;     // [batch, backbone]
};

}  // namespace mtp
