// Attention of few draft queries over many keys of 256 or 512 elements: see attend_kernel.h, on Hopper and Blackwell,
// and frontier_kernel.h, on Hopper.
#pragma once

#include <cstdint>

namespace mtp::cuda {

// Queries of a KV head, rows times heads, that are served: by attend_kernel.h,
constexpr bool attends(int head_dim, int64_t queries) {
  return queries >= 1 && ((head_dim == 256 && queries <= 8) || (head_dim == 512 && queries <= 16));
}

// and by frontier_kernel.h.
constexpr bool is_frontier(int head_dim, int64_t queries) { return head_dim == 512 && queries >= 17 && queries <= 64; }

// What triton_ops/_attention_kernels.py's `attend` takes, and leaves in `partial` and `stats`.
struct Attend {
  const void* q = nullptr;  // [batch, rows, heads, head_dim] bf16
  const void* k = nullptr;  // [pages, page_size, kv_heads, head_dim] bf16
  const void* v = nullptr;
  const void* table = nullptr;    // [batch, max_pages], or with kv_indptr [entries]
  const void* lengths = nullptr;  // [batch]
  const void* indptr = nullptr;   // [batch + 1], or null
  const void* norm = nullptr;     // [head_dim] bf16, or null
  const float* freq = nullptr;    // [num_pairs], or null
  const void* positions = nullptr;
  const float* k_scale = nullptr;  // one, or one a KV head, or null
  float* partial = nullptr;        // [batch * rows * heads, parts, head_dim]
  float* stats = nullptr;          // [batch * rows * heads, parts, 2]
  bool table_is_int64 = false, lengths_are_int64 = false, indptr_is_int64 = false, positions_are_int64 = false;
  int64_t q_stride_batch = 0, q_stride_row = 0, q_stride_head = 0;  // elements
  int64_t k_stride_head = 0, v_stride_head = 0;
  uint32_t stride_page = 0, stride_slot = 0;  // of both, in 8 elements; a whole cache has less than 2^32 - 1 of these
  int64_t table_stride = 0, table_size = 0;
  int64_t position_stride_batch = 0, position_stride = 0;
  int64_t k_scale_stride = 0;
  int num_pages = 0, page_size = 0, bound = 0;
  float chunk_weight = 0;
  int log2_max_chunks = 0;
  int chunks_a_part = 0, folds_a_part = 1;  // 2: of half of the chunks each
  int column_blocks = 1;                    // of a frontier: blocks that share a unit
  int parts = 0;
  int batch = 0, rows = 0, kv_heads = 0, head_dim = 0, num_pairs = 0;
  int group = 0;          // query heads of a KV head,
  int group_inverse = 0;  // and 2^16 over that, rounded up
  float sm_scale = 0, eps = 0;
};

// 0, or the code of a CUDA error. `early`: may start before the kernel in front of it has ended.
int launch_attend(const Attend& attend, int blocks, bool early, void* stream);
int launch_frontier(const Attend& attend, int blocks, bool early, void* stream);

}  // namespace mtp::cuda
