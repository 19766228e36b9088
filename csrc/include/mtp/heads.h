// The heads' kernels: dot products of a few rows with the rows of a weight, logsumexp, the chunks of a dense head.
#pragma once

#include <stdint.h>

namespace mtp {

constexpr int64_t kHeadPad = 64;        // rows in fp32 are padded with zeros to a multiple of this
constexpr int64_t kHeadRows = 64;       // rows that one pass over a weight serves at the most
constexpr int64_t kLmHeadBlock = 128;   // rows of the weight whose logits are held at a time
constexpr int64_t kLmHeadChunk = 1024;  // rows of the weight that one task takes
// Rows of the weight that stay in the cache while all rows of x pass, and that are asked for together. 32768 gathered
// rows of 512 bytes, 2 cores: 690 us with 16, 650 with 32.
constexpr int64_t kHeadTile = 32;
constexpr int64_t kNoId = INT64_MAX;  // behind every token id, with a value of -inf

struct HeadDotsParams {
  const float* x;  // [rows, hidden padded to kHeadPad], rows x_stride apart
  int64_t x_stride;
  int64_t rows;
  const void* weight;  // [any, hidden], rows weight_stride elements apart
  int64_t weight_stride;
  int64_t hidden;
  const int64_t* index;  // [count], the rows of the weight; null for its first ones
  int64_t count;
  float* out;  // [rows, count], rows out_stride apart
  int64_t out_stride;
  const int64_t* index_behind;  // [count_behind <= kHeadTile], rows that the next call begins with
  int64_t count_behind;         // 0 where nothing is known of it
};

// log(sum(exp)) in two parts: the largest value, and the sum of exp(value - largest); NaN adds nothing.
struct LogSum {
  float largest;
  double sum;
};

struct LmHeadParams {
  const float* x;  // [rows, hidden padded to kHeadPad]
  int64_t x_stride;
  int64_t rows;        // at most kHeadRows
  const void* weight;  // [vocab, hidden], rows weight_stride elements apart
  int64_t weight_stride;
  int64_t hidden;
  int64_t vocab;
  const float* scale;     // [vocab] or null
  const void* token_map;  // [vocab] int32 or int64, or null
  bool map_is_int64;
  int64_t vocab_start;
  float soft_cap;               // 0 for none
  const int64_t* suppress_ids;  // [num_suppressed] token ids
  int64_t num_suppressed;
  int64_t k;
  int64_t chunks;

  float* best;        // [rows, chunks, k], best first, ties by id; -inf and kNoId behind them
  int64_t* best_ids;  // [rows, chunks, k]
  LogSum* sums;       // [rows, chunks]
};

// The arrays are by element type: fp32, bf16, fp16, and fp8 (e4m3) of a weight.
struct HeadKernels {
  // x in fp32, with zeros behind it up to a multiple of kHeadPad, in the order that the products with a weight of
  // `parts` elements a 32-bit word take.
  void (*widen[3])(const void* x, int64_t count, int parts, float* out);
  // A product's bits depend on its row, its row of the weight and their length alone.
  void (*dots[4])(const HeadDotsParams& p);
  // The k best of `count` values in order: higher value first, NaN as -inf, then the lower id. Their ids are ids[i], or
  // i.
  void (*best)(const float* values, const int64_t* ids, int64_t count, int64_t k, float* best, int64_t* best_ids);
  LogSum (*log_sum)(const float* values, int64_t count);
  LogSum (*merge)(LogSum a, LogSum b);
  void (*lm_head_chunk[4])(const LmHeadParams& p, int64_t chunk);
};

}  // namespace mtp
