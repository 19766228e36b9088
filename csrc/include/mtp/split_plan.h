// How draft_attention splits the visible keys of a request on a CPU: a pure function of their number alone.
//
// The batch is no input: a request's splits, and with them the order in which its partial results are summed, do not
// change with the requests beside it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mtp {

// Split i holds the visible keys [i * keys_per_split, (i + 1) * keys_per_split), the last one perhaps fewer.
struct SplitPlan {
  int64_t keys_per_split;
  int64_t num_splits;  // 0 where nothing is visible; never an empty one
};

// An even number of splits lets two threads finish together; long requests have long splits, whose merging costs less.
inline SplitPlan split_plan(int64_t visible_len) {
  constexpr int64_t kWhole = 32;  // keys that are not split: they take less time than to merge two splits
  constexpr int64_t kLeast = 128, kMost = 512;
  constexpr int64_t kPart = 16;  // between these two a split is this part of the keys
  const int64_t keys = std::max<int64_t>(visible_len, 0);
  if (keys == 0) {
    return {0, 0};
  }
  const int64_t wanted = std::clamp(keys / kPart, kLeast, kMost);
  const int64_t splits = keys <= kWhole ? 1 : 2 * ((keys - 1) / (2 * wanted) + 1);
  const int64_t keys_per_split = (keys - 1) / splits + 1;
  return {keys_per_split, (keys - 1) / keys_per_split + 1};
}

}  // namespace mtp
