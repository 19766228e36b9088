// How draft_attention splits the visible keys of a request over blocks: pure functions of one request's own sizes.
//
// The batch is no input: a request's splits, and with them the order in which its partial results are summed, do not
// change with the requests beside it.
#pragma once

#include <cstdint>
#include <string>

namespace mtp {

// UNTUNED: sensible first values, to be set from measurements once a kernel uses them.
inline constexpr int64_t kTileBytes = 32 * 1024;         // K (or V) bytes a block loads at once
inline constexpr int64_t kMinTileKeys = 16;              // one mma operand
inline constexpr int64_t kMaxTileKeys = 128;             // more in flight than one block needs
inline constexpr int64_t kMinKeysPerSplit = 256;         // below it, merging costs more than it saves
inline constexpr int64_t kMaxSplits = 128;               // partial results the merge reads for a request
inline constexpr int64_t kMaxLength = int64_t{1} << 40;  // keeps every product below inside 64 bits

// One request of one attention layer.
struct SplitProblem {
  int64_t visible_len;  // keys the request sees
  int64_t first_key;    // keys before them, behind the window
  int64_t page_size;
  int64_t rows;  // queries of the request: 1 in a chain, topk in a tree
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t element_size;  // bytes of one cached value
  int64_t num_sms;       // multiprocessors of the device

  bool operator==(const SplitProblem& other) const;
};

// Split i holds the visible keys of [start + i * keys_per_split, start + (i + 1) * keys_per_split).
struct SplitPlan {
  int64_t start;           // the first key's page boundary
  int64_t tile_keys;       // keys a block loads at once
  int64_t keys_per_split;  // a multiple of the page; of the tile too, where page or tile divides the other
  int64_t num_splits;      // 0 where nothing is visible; never an empty one

  bool operator==(const SplitPlan& other) const;
};

// Throws std::invalid_argument, naming the field, on a size that cannot be.
SplitPlan split_plan(const SplitProblem& problem);

// The most splits that any request of at most problem.visible_len visible keys gets, wherever its window starts.
int64_t max_splits(const SplitProblem& problem);

// Bytes for the partial results of `batch` requests of at most problem.visible_len visible keys: an fp32 output and
// log-sum-exp a split, head and row; none where one split is enough, since it writes the result itself.
int64_t workspace_bytes(const SplitProblem& problem, int64_t batch);

std::string to_string(const SplitProblem& problem);
std::string to_string(const SplitPlan& plan);

}  // namespace mtp
