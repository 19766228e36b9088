// mtp_cuda::attend: the first kernel of draft_attention for heads of 256 or 512 elements (attend_kernel.h), as a
// private op on the stable ABI.
#include "attend.h"

#include <cuda_runtime_api.h>

#include "op.h"

namespace mtp::cuda {
namespace {

constexpr char kOp[] = "attend";
constexpr int64_t kMostInt = 0x7fffffff;

// Rows of bf16 that can be read 16 bytes at a time.
const void* heads(const Tensor& tensor, const char* name, int64_t head_dim) {
  bool fits = tensor.dim() == 4 && tensor.scalar_type() == ScalarType::BFloat16 && tensor.size(3) == head_dim &&
              tensor.stride(3) == 1 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  for (int i = 0; fits && i < 3; ++i) {
    fits = tensor.stride(i) % 8 == 0;
  }
  STD_TORCH_CHECK(fits, "attend: ", name, " does not have bf16 rows of ", head_dim, " in multiples of 16 bytes");
  return tensor.const_data_ptr();
}

void attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
            std::optional<Tensor> kv_indptr, std::optional<Tensor> k_scale, std::optional<Tensor> norm,
            std::optional<Tensor> freq, std::optional<Tensor> positions, Tensor partial, Tensor stats, double sm_scale,
            double eps, int64_t bound, double chunk_weight, int64_t max_chunks, int64_t chunks_a_part,
            int64_t folds_a_part, int64_t column_blocks, int64_t blocks, bool early) {
  Attend a;
  STD_TORCH_CHECK(q.dim() == 4, "attend: q is not [batch, rows, heads, head_dim]");
  const int64_t head_dim = q.size(3);
  a.q = heads(q, "q", head_dim);
  a.k = heads(k_cache, "k_cache", head_dim);
  a.v = heads(v_cache, "v_cache", head_dim);
  const int64_t batch = q.size(0), rows = q.size(1), num_heads = q.size(2);
  const int64_t pages = k_cache.size(0), page_size = k_cache.size(1), kv_heads = k_cache.size(2);
  const int64_t queries = kv_heads > 0 ? rows * (num_heads / kv_heads) : 0;
  const bool frontier = is_frontier(static_cast<int>(head_dim), queries);
  STD_TORCH_CHECK(kv_heads > 0 && num_heads % kv_heads == 0 && head_dim <= 512 &&
                      (attends(static_cast<int>(head_dim), queries) || frontier) && batch > 0 &&
                      batch * rows * num_heads < kMostInt && pages > 0 && pages < kMostInt && page_size > 0 &&
                      page_size < kMostInt && v_cache.size(0) == pages && v_cache.size(1) == page_size &&
                      v_cache.size(2) == kv_heads,
                  "attend: sizes that are not served");
  const int64_t last = (pages - 1) * k_cache.stride(0) + (page_size - 1) * k_cache.stride(1);
  STD_TORCH_CHECK(k_cache.stride(0) == v_cache.stride(0) && k_cache.stride(1) == v_cache.stride(1) &&
                      k_cache.stride(0) >= 0 && k_cache.stride(1) >= 0 && last / 8 < 0xffffffff,
                  "attend: caches of other strides each, or too large");
  a.stride_page = static_cast<uint32_t>(k_cache.stride(0) / 8);
  a.stride_slot = static_cast<uint32_t>(k_cache.stride(1) / 8);
  a.k_stride_head = k_cache.stride(2);
  a.v_stride_head = v_cache.stride(2);
  a.q_stride_batch = q.stride(0);
  a.q_stride_row = q.stride(1);
  a.q_stride_head = q.stride(2);

  a.table_is_int64 = is_int64(block_table, kOp, "block_table");
  a.lengths_are_int64 = is_int64(seq_lens, kOp, "seq_lens");
  check(seq_lens, kOp, "seq_lens", seq_lens.scalar_type(), {batch});
  a.table = block_table.const_data_ptr();
  a.lengths = seq_lens.const_data_ptr();
  a.table_size = block_table.size(block_table.dim() - 1);
  if (kv_indptr) {
    a.indptr_is_int64 = is_int64(*kv_indptr, kOp, "kv_indptr");
    check(*kv_indptr, kOp, "kv_indptr", kv_indptr->scalar_type(), {batch + 1});
    a.indptr = kv_indptr->const_data_ptr();
  } else {
    STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == batch && block_table.stride(1) == 1,
                    "attend: block_table is not [batch, max_pages]");
    a.table_stride = block_table.stride(0);
  }

  if (k_scale) {
    a.k_scale_stride = scale_stride(*k_scale, kOp, "k_scale", kv_heads);
    a.k_scale = k_scale->const_data_ptr<float>();
  }
  if (norm) {
    check(*norm, kOp, "norm", ScalarType::BFloat16, {head_dim});
    a.norm = norm->const_data_ptr();
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(a.norm) % 16 == 0, "attend: norm is not at a multiple of 16 bytes");
  }
  if (freq) {
    STD_TORCH_CHECK(positions && positions->dim() <= 2 && positions->size(0) == batch,
                    "attend: freq without positions");
    check(*freq, kOp, "freq", ScalarType::Float, {freq->numel()});
    STD_TORCH_CHECK(freq->numel() <= head_dim / 2, "attend: more pairs than there are");
    a.freq = freq->const_data_ptr<float>();
    a.num_pairs = static_cast<int>(freq->numel());
    a.positions_are_int64 = is_int64(*positions, kOp, "positions");
    a.positions = positions->const_data_ptr();
    a.position_stride_batch = positions->stride(0);
    a.position_stride = positions->dim() == 1 ? 0 : positions->stride(1);
  }

  a.parts = static_cast<int>(partial.size(1));
  check(partial, kOp, "partial", ScalarType::Float, {batch * rows * num_heads, a.parts, head_dim});
  check(stats, kOp, "stats", ScalarType::Float, {batch * rows * num_heads, a.parts, 2});
  a.partial = static_cast<float*>(partial.mutable_data_ptr());
  a.stats = static_cast<float*>(stats.mutable_data_ptr());
  STD_TORCH_CHECK((column_blocks == 1 || (column_blocks == 2 && frontier)) &&
                      blocks % (kv_heads * column_blocks) == 0 && bound > 0 && bound <= kMostInt &&
                      chunks_a_part >= 1 && chunks_a_part <= 64 && max_chunks >= 1 && max_chunks <= 65536 &&
                      blocks >= 1 && blocks < kMostInt,
                  "attend: chunks that are not served");
  STD_TORCH_CHECK(
      frontier ? folds_a_part == 1 && (chunks_a_part == 1 || column_blocks == 2 || queries <= 32)
               : folds_a_part == 1 || (folds_a_part == 2 && chunks_a_part % 2 == 0 && head_dim == 512 && queries > 4),
      "attend: folds that are not served");
  a.bound = static_cast<int>(bound);
  a.chunk_weight = static_cast<float>(chunk_weight);
  a.log2_max_chunks = log2_of(max_chunks, kOp, "max_chunks");
  a.chunks_a_part = static_cast<int>(chunks_a_part);
  a.folds_a_part = static_cast<int>(folds_a_part);
  a.column_blocks = static_cast<int>(column_blocks);
  a.num_pages = static_cast<int>(pages);
  a.page_size = static_cast<int>(page_size);
  a.batch = static_cast<int>(batch);
  a.rows = static_cast<int>(rows);
  a.kv_heads = static_cast<int>(kv_heads);
  a.head_dim = static_cast<int>(head_dim);
  a.group = static_cast<int>(num_heads / kv_heads);
  a.group_inverse = (65536 + a.group - 1) / a.group;
  a.sm_scale = static_cast<float>(sm_scale);
  a.eps = static_cast<float>(eps);

  const int device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const auto launch = frontier ? launch_frontier : launch_attend;
  const int error = launch(a, static_cast<int>(blocks), early, current_stream(device));
  STD_TORCH_CHECK(error == 0, "attend: ", cudaGetErrorString(static_cast<cudaError_t>(error)));
}

}  // namespace
}  // namespace mtp::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cuda, m) {
  m.def(
      "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor? kv_indptr, "
      "Tensor? k_scale, Tensor? norm, Tensor? freq, Tensor? positions, Tensor(a!) partial, Tensor(b!) stats, float "
      "sm_scale, float eps, int bound, float chunk_weight, int max_chunks, int chunks_a_part, int "
      "folds_a_part, int column_blocks, int blocks, bool early) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cuda, CUDA, m) { m.impl("attend", TORCH_BOX(&mtp::cuda::attend)); }
