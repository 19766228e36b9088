// Attention of the draft queries over a paged KV cache, in splits of each request's visible keys.
#pragma once

#include "mtp/views.h"

namespace mtp {

// The visible keys of a request, `split_keys` to a split, the last split perhaps less.
struct AttentionRequest {
  int64_t first_entry;  // of its pages in a flat table; 0 otherwise
  int64_t begin;        // first visible key
  int64_t end;          // behind the last
  int64_t split_keys;
  int64_t splits;
  int64_t first_part;  // its parts are first_part + split * num_kv_heads + KV head
};

// Query i of a KV head is row i / group, head i % group of that KV head. `width` is head_dim rounded up to whole steps
// of the kernels; what is behind head_dim is zero. With `paired` the even elements of a step come before its odd ones:
// the order in which 16 bits widen fastest. With `rounded` queries and softmax weights meet a cache of bf16 as pairs of
// bf16, as in the matrix products of PyTorch and of the Triton kernels: half the instructions.
struct AttentionParams {
  int64_t batch;
  int64_t rows;
  int64_t num_kv_heads;
  int64_t group;    // query heads of a KV head
  int64_t queries;  // rows * group
  int64_t head_dim;
  int64_t width;
  int64_t query_width;  // floats that a query made ready takes: width, or half of it where it is rounded
  int64_t num_pages;
  int64_t page_size;
  int64_t score_stride;  // from one query's scores to the next's
  float sm_scale;
  float logits_soft_cap;  // 0 for none
  float norm_eps;
  bool norm_is_float;  // else of q's type
  bool paired;
  bool rounded;

  const void* q;             // [batch, rows, num_kv_heads * group, head_dim], last dimension contiguous
  int64_t q_stride[3];       //
  const void* norm_weight;   // [head_dim], null for none
  const float* inv_freq;     // [num_pairs], null for none
  int64_t num_pairs;         //
  IndexView<2> positions;    // [batch, rows]
  const void* k;             // [num_pages, page_size, num_kv_heads, head_dim], last dimension contiguous
  const void* v;             // the same
  int64_t k_stride[3];       //
  int64_t v_stride[3];       //
  IndexView<2> block_table;  // [batch, entries]; one flat row for all has stride 0
  const float* k_scale;      // [num_kv_heads], by stride 0 or 1; null for none
  const float* v_scale;      // the same
  int64_t k_scale_stride;
  int64_t v_scale_stride;

  const AttentionRequest* requests;  // [batch]
  float* queries_ready;              // [batch, num_kv_heads, queries, query_width]: normed, turned, scaled; steps
                                     // interleaved within a tile of kAttentionTile queries
  float* partial;                    // [parts, queries, width]: weighted sums of values
  float* partial_max;                // [parts, queries]: greatest score of the split, later the split's weight
  float* partial_sum;                // [parts, queries]: sum of exp(score - max)
  void* output;                      // [batch, rows, num_kv_heads * group, head_dim], contiguous, q's type
};

constexpr int64_t kAttentionBlock = 16;  // keys that are worked on together
constexpr int64_t kAttentionTile = 4;    // queries that share what is widened of a key or value

// What comes before and behind the splits, of q's type (FloatType 0 to 2).
struct AttentionEnds {
  int64_t step;   // `width` is a multiple of it
  bool pair_dot;  // pairs of bf16 are multiplied
  // All heads of a row. `scratch`: 4 * width floats.
  void (*prepare[3])(const AttentionParams& p, int64_t b, int64_t row, float* scratch);
  // The splits of a query of a request and KV head become its part of the output. `scratch`: width floats.
  void (*merge[3])(const AttentionParams& p, int64_t b, int64_t head, int64_t query, float* scratch);
};

struct AttentionKernels {
  // KV heads [head, head + heads) of a split, in the caches' type (FloatType). Their rows of a key lie side by side in
  // most caches, and so are read by one thread. `scratch`: heads * queries * score_stride + kAttentionBlock * width
  // floats.
  void (*attend[4])(const AttentionParams& p, int64_t b, int64_t head, int64_t heads, int64_t split, float* scratch);
};

}  // namespace mtp
