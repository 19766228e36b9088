#include <atomic>
#include <memory>
#include <vector>

#include "isa.h"
#include "launch.h"
#include "mtp/attention.h"

MTP_KERNELS(AttentionEnds, attention_ends)
MTP_KERNELS(AttentionKernels, attention_kernels)

namespace mtp::cpu {
namespace {

constexpr int64_t kVector = 16;  // floats to a cache line

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The FloatType of a tensor, as an index into the tables.
int64_t float_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return 0;
    case ScalarType::BFloat16:
      return 1;
    case ScalarType::Half:
      return 2;
    case ScalarType::Float8_e4m3fn:
      return 3;
    default:
      STD_TORCH_CHECK(false, "draft_attention: expected float32, bfloat16, float16 or float8_e4m3fn");
  }
}

// A function of the request's own keys alone, so that its bits do not depend on its neighbours. An even number of
// splits lets two threads finish together; long requests have long splits, whose merging costs less.
void plan_splits(AttentionRequest& request) {
  const int64_t keys = request.end - request.begin;
  constexpr int64_t kFew = 32, kLeast = 128, kMost = 512;  // UNTUNED
  const int64_t wanted = std::clamp(keys / kVector, kLeast, kMost);
  const int64_t splits = keys <= kFew ? 1 : 2 * ((keys + 2 * wanted - 1) / (2 * wanted));
  request.split_keys = (keys + splits - 1) / splits;
  request.splits = keys == 0 ? 0 : (keys + request.split_keys - 1) / request.split_keys;
}

// Visible keys and splits of each request; sets first_unit and returns the number of units.
int64_t plan(const Tensor& block_table, const Tensor& seq_lens, const std::optional<Tensor>& kv_indptr,
             int64_t max_seq_len, int64_t window_left, const AttentionParams& p, AttentionRequest* requests) {
  const IndexView<1> lengths = index_view<1>(seq_lens);
  const int64_t entries = block_table.size(block_table.dim() - 1);
  const IndexView<1> bounds = kv_indptr ? index_view<1>(*kv_indptr) : IndexView<1>{};
  int64_t units = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    AttentionRequest& request = requests[b];
    const int64_t first = kv_indptr ? std::clamp<int64_t>(bounds(b), 0, entries) : 0;
    const int64_t last = kv_indptr ? std::clamp<int64_t>(bounds(b + 1), 0, entries) : entries;
    const int64_t capacity = p.num_pages > 0 ? std::max<int64_t>(last - first, 0) * p.page_size : 0;
    request.first_entry = first;
    request.end = std::clamp<int64_t>(lengths(b), 0, capacity);
    int64_t visible = request.end;
    if (max_seq_len >= 0) {
      visible = std::min(visible, max_seq_len);
    }
    if (window_left >= 0) {
      visible = std::min(visible - 1, window_left) + 1;
    }
    request.begin = request.end - visible;
    request.first_unit = units;
    plan_splits(request);
    units += request.splits * p.num_kv_heads;
  }
  return units;
}

// Threads take units as they become free; who finishes the last split of a request and KV head merges them all, in
// order. What is computed does not depend on who computes it.
void attend_all(const AttentionParams& p, int64_t units, int64_t tasks, int64_t q_type, int64_t kv_type, float* scratch,
                int64_t scratch_size) {
  std::unique_ptr<std::atomic<int64_t>[]> done(new std::atomic<int64_t>[p.batch * p.num_kv_heads]);
  for (int64_t i = 0; i < p.batch * p.num_kv_heads; ++i) {
    done[i].store(0, std::memory_order_relaxed);
  }
  std::atomic<int64_t> next{0};
  const AttentionKernels& kernels = attention_kernels();
  const AttentionEnds& ends = attention_ends();
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t task, int64_t) {
    float* mine = scratch + task * scratch_size;
    int64_t b = 0;
    for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) {
      while (unit >= p.requests[b].first_unit + p.requests[b].splits * p.num_kv_heads) {
        ++b;
      }
      const AttentionRequest& request = p.requests[b];
      const int64_t split = (unit - request.first_unit) / p.num_kv_heads;
      const int64_t head = (unit - request.first_unit) % p.num_kv_heads;
      kernels.attend[kv_type](p, b, head, split, mine);
      if (done[b * p.num_kv_heads + head].fetch_add(1, std::memory_order_acq_rel) == request.splits - 1) {
        ends.merge[q_type](p, b, head, mine);
      }
    }
  });
}

void read_tensors(AttentionParams& p, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                  const Tensor& block_table, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                  const std::optional<Tensor>& q_norm_weight, const std::optional<Tensor>& rope_inv_freq,
                  const std::optional<Tensor>& positions) {
  p.batch = q.size(0);
  p.rows = q.size(1);
  p.head_dim = q.size(3);
  p.num_pages = k_cache.size(0);
  p.page_size = k_cache.size(1);
  p.num_kv_heads = k_cache.size(2);
  p.group = q.size(2) / p.num_kv_heads;
  p.queries = p.rows * p.group;
  p.width = round_up(p.head_dim, attention_ends().step);
  p.q = q.const_data_ptr();
  p.k = k_cache.const_data_ptr();
  p.v = v_cache.const_data_ptr();
  std::copy_n(q.strides().data(), 3, p.q_stride);
  std::copy_n(k_cache.strides().data(), 3, p.k_stride);
  std::copy_n(v_cache.strides().data(), 3, p.v_stride);
  p.block_table.data = block_table.const_data_ptr();
  p.block_table.is_int64 = block_table.scalar_type() == ScalarType::Long;
  p.block_table.stride[0] = block_table.dim() == 2 ? block_table.stride(0) : 0;
  p.block_table.stride[1] = block_table.stride(block_table.dim() - 1);
  if (k_scale) {
    p.k_scale = k_scale->const_data_ptr<float>();
    p.k_scale_stride = k_scale->numel() == 1 ? 0 : k_scale->stride(0);
  }
  if (v_scale) {
    p.v_scale = v_scale->const_data_ptr<float>();
    p.v_scale_stride = v_scale->numel() == 1 ? 0 : v_scale->stride(0);
  }
  if (q_norm_weight) {
    p.norm_weight = q_norm_weight->const_data_ptr();
    p.norm_is_float = q_norm_weight->scalar_type() == ScalarType::Float;
  }
  if (rope_inv_freq) {
    p.inv_freq = rope_inv_freq->const_data_ptr<float>();
    p.num_pairs = rope_inv_freq->numel();
    p.positions.data = positions->const_data_ptr();
    p.positions.is_int64 = positions->scalar_type() == ScalarType::Long;
    p.positions.stride[0] = positions->stride(0);
    p.positions.stride[1] = positions->dim() == 2 ? positions->stride(1) : 0;
  }
}

Tensor draft_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, double sm_scale,
                       std::optional<Tensor> kv_indptr, int64_t max_seq_len, int64_t window_left,
                       double logits_soft_cap, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                       std::optional<Tensor> q_norm_weight, double q_norm_eps, std::optional<Tensor> rope_inv_freq,
                       std::optional<Tensor> positions) {
  AttentionParams p{};
  read_tensors(p, q, k_cache, v_cache, block_table, k_scale, v_scale, q_norm_weight, rope_inv_freq, positions);
  const int64_t q_type = float_type(q), kv_type = float_type(k_cache);
  p.sm_scale = static_cast<float>(sm_scale);
  p.logits_soft_cap = static_cast<float>(logits_soft_cap);
  p.norm_eps = static_cast<float>(q_norm_eps);
  p.paired = kv_type == 1;
  Tensor output = empty_of_dtype({p.batch, p.rows, p.num_kv_heads * p.group, p.head_dim}, q);
  if (output.numel() == 0) {
    return output;
  }
  p.output = output.mutable_data_ptr();
  std::vector<AttentionRequest> requests(p.batch);
  const int64_t units = plan(block_table, seq_lens, kv_indptr, max_seq_len, window_left, p, requests.data());
  p.requests = requests.data();

  int64_t keys = 0, split_keys = 0;
  for (const AttentionRequest& request : requests) {
    keys += request.end - request.begin;
    split_keys = std::max(split_keys, request.split_keys);
  }
  p.score_stride = round_up(split_keys + kAttentionBlock, kVector);
  constexpr int64_t kWorkPerTask = 65536;  // UNTUNED: elements of K that take about as long as starting a thread
  const int64_t most_tasks = std::min<int64_t>(torch::stable::get_num_threads(), units);
  const int64_t tasks =
      std::clamp<int64_t>(keys * p.num_kv_heads * p.width / kWorkPerTask, 1, std::max<int64_t>(most_tasks, 1));

  // One allocation: queries, the units' results, and every task's scratch, each from a cache line's start.
  const int64_t queries_size = p.batch * p.num_kv_heads * p.queries * p.width;
  const int64_t stats_size = round_up(units * p.queries, kVector);
  const int64_t scratch_size = round_up(p.queries * p.score_stride + kAttentionBlock * p.width, kVector);
  Tensor workspace = empty_float({round_up(queries_size, kVector) + round_up(units * p.queries * p.width, kVector) +
                                  2 * stats_size + tasks * scratch_size});
  p.queries_ready = data<float>(workspace);
  p.partial = p.queries_ready + round_up(queries_size, kVector);
  p.partial_max = p.partial + round_up(units * p.queries * p.width, kVector);
  p.partial_sum = p.partial_max + stats_size;
  float* scratch = p.partial_sum + stats_size;

  const int64_t row_size = p.num_kv_heads * p.group * p.width;
  for_requests(p.batch * p.rows, row_size, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(4 * p.width);
    for (int64_t i = begin; i < end; ++i) {
      attention_ends().prepare[q_type](p, i / p.rows, i % p.rows, buffer.data());
    }
  });
  if (units > 0) {
    attend_all(p, units, tasks, q_type, kv_type, scratch, scratch_size);
  }
  return output;
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "draft_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, float sm_scale,"
      " *, Tensor? kv_indptr=None, SymInt max_seq_len=-1, int window_left=-1, float logits_soft_cap=0.0,"
      " Tensor? k_scale=None, Tensor? v_scale=None, Tensor? q_norm_weight=None, float q_norm_eps=1e-6,"
      " Tensor? rope_inv_freq=None, Tensor? positions=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("draft_attention", TORCH_BOX(&mtp::cpu::draft_attention)); }
