// What lies between two attentions of a draft step, as one launch: see segment.cu.
#pragma once

#include <cstdint>

#include "sizes.h"

namespace mtp::cuda {

constexpr int kMostRows = 64;
constexpr int kMostGroups = 4;   // of rows, each with blocks of its own
constexpr int kUnitColumns = 8;  // columns of a product that one warp computes at a time
constexpr int kHidden = 256;
constexpr int kLog2Warps = 3;     // of a block
constexpr int kShareDepth = 128;  // a warp's share of a depth is a multiple of this
constexpr int kMostProducts = 5;
constexpr int kMostRuns = 32;  // of a warp, see queue.h

enum { kOutput, kGateUp, kDown, kNext, kScores };  // the products of a segment, in their order

// weight [columns, depth] bf16, rows `stride` apart. In each group block `first_block` has the first unit, the next one
// the second.
struct Product {
  const void* weight = nullptr;
  int64_t stride = 0;
  int64_t second = 0;  // elements between a row of gate and the row of up that belongs to it; 0 otherwise
  int columns = 0;     // of the result
  int pieces = 0;      // of one warp's share of the depth
  int log2_warps = 0;  // that share a unit: one has gate or up, where there is a second, and some of the depth
  int units_each = 0;  // units of a block,
  int units_more = 0;  // and how many blocks have one more
  int first_block = 0;
  int first_warp = 0;
};

// What draft_attention's chunks left (triton_ops/_attention_kernels.py), or with `attended` its result.
struct Attention {
  const void* attended = nullptr;  // [rows, heads * head_dim] bf16
  const float* partial = nullptr;  // [rows * heads, parts, head_dim]
  const float* stats = nullptr;    // [rows * heads, parts, 2]
  const void* seq_lens = nullptr;  // [batch] int32 or int64
  bool lengths_are_int64 = false;
  const float* v_scale = nullptr;  // one, or one a KV head
  int64_t v_scale_stride = 0;
  int64_t capacity = 0;  // keys that a request's table has room for
  int64_t bound = 0;     // keys that a query may see
  float chunk_weight = 0;
  int log2_max_chunks = 0;
  int chunk_multiple = 0;  // keys, a power of two
  int fold = 0;            // chunks
  int log2_fold = 0;
  int chunks_a_part = 0;  // 1 or `fold`
  int parts = 0;
  int log2_heads = 0;
  int head_dim = 0;
  int log2_lanes = 0;  // that share the folds of a query's elements
  int log2_units = 0;  // of a warp in a head
  int log2_group = 0;  // query heads of a KV head
  int rows_each = 0;
};

struct Segment {
  Product products[kMostProducts];
  int num_products = 0;
  Attention attention;
  const void* residual = nullptr;  // [rows, hidden] bf16, before the attention
  const void* post_attention_norm = nullptr;
  const void* pre_feedforward_norm = nullptr;
  const void* post_feedforward_norm = nullptr;
  const void* layer_scalar = nullptr;  // one bf16, or null
  const void* next_norm = nullptr;
  float eps = 0;
  int rows = 0;
  int group_rows = 0;    // of each group but the last, which may have fewer
  int group_blocks = 0;  // of each
  int attended_columns = 0;
  int inner_columns = 0;
  uint64_t* epochs = nullptr;         // [kMostGroups], all equal; see segment.cu
  uint64_t* mail_attended = nullptr;  // [rows, attended_columns / 2]
  uint64_t* mail_o = nullptr;         // [rows, hidden]
  uint64_t* mail_inner = nullptr;     // [rows, inner_columns / 2]
  uint64_t* mail_down = nullptr;      // [rows, hidden]
  uint64_t* mail_normed = nullptr;    // [2, rows, hidden / 2], where a block does not compute all its group's rows
  void* x_out = nullptr;              // [rows, hidden] bf16, or null
  void* normed = nullptr;             // [rows, hidden] bf16, or null
  void* output = nullptr;             // [rows, columns] bf16, of the first product that follows
  float* scores = nullptr;            // [rows, columns], of the second
  float* group_max = nullptr;         // [rows, columns / 8], the largest of each unit's scores
};

// How rows are dealt to groups: so many each, and so many groups. A group of fewer rows has less to wait for, but every
// group reads all weights. Microseconds of a step of E4B on an H200 with one, two and four: 4 x 1024 75.3, 73.3
// and 78.3, 8 x 8192 157 (a block of 8 rows takes 164 registers, and starts late), 144.7 and 150.0, 16 x 4096 two
// 175.7 and four 182.1, 32 x 4096 264.3 and 263.6.
constexpr int rows_of_group(int rows) { return rows <= 32 ? (rows + 1) / 2 : (rows + 3) / 4; }
constexpr int count_groups(int rows) { return (rows + rows_of_group(rows) - 1) / rows_of_group(rows); }

// Warps that share a unit of gate and up: of one row, where a block has two units at most, four; else two.
constexpr int log2_gated_warps(int rows) { return rows == 1 ? 2 : 1; }

// Shared memory of a block for so many rows.
int segment_bytes(int rows);

// 0, or the code of a CUDA error. `early`: may start before the kernel in front of it has ended (sm_90 and later).
int launch_segment(const Segment& segment, bool early, void* stream);

}  // namespace mtp::cuda
