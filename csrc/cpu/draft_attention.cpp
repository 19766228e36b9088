#include "draft_attention.h"

#include "mtp/split_plan.h"

namespace mtp::cpu {
namespace {

constexpr int64_t kVector = 16;  // floats to a cache line

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Visible keys and splits of each request; sets first_part and returns the number of parts.
int64_t plan(const Cache& cache, const AttentionParams& p, AttentionRequest* requests) {
  const IndexView<1> lengths = index_view<1>(cache.seq_lens);
  const int64_t entries = cache.block_table.size(cache.block_table.dim() - 1);
  const IndexView<1> bounds = cache.kv_indptr ? index_view<1>(*cache.kv_indptr) : IndexView<1>{};
  int64_t parts = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    AttentionRequest& request = requests[b];
    const int64_t first = cache.kv_indptr ? std::clamp<int64_t>(bounds(b), 0, entries) : 0;
    const int64_t last = cache.kv_indptr ? std::clamp<int64_t>(bounds(b + 1), 0, entries) : entries;
    const int64_t capacity = p.num_pages > 0 ? std::max<int64_t>(last - first, 0) * p.page_size : 0;
    request.first_entry = first;
    request.end = std::clamp<int64_t>(lengths(b), 0, capacity);
    int64_t visible = request.end;
    if (cache.max_seq_len >= 0) {
      visible = std::min(visible, cache.max_seq_len);
    }
    if (cache.window_left >= 0) {
      visible = std::min(visible - 1, cache.window_left) + 1;
    }
    request.begin = request.end - visible;
    request.first_part = parts;
    const SplitPlan splits = split_plan(visible);
    request.split_keys = splits.keys_per_split;
    request.splits = splits.num_splits;
    parts += request.splits * p.num_kv_heads;
  }
  return parts;
}

// How many KV heads of a split one task takes, a divisor of their number: all of them, so that a thread reads whole
// runs of memory, while there are tasks enough for the threads and the scores of a task stay in a cache. A head's bits
// do not depend on it.
int64_t heads_together(const AttentionParams& p, int64_t parts, int64_t members) {
  constexpr int64_t kMostQueries = 64;
  int64_t together = p.num_kv_heads;
  while (together % 2 == 0 && (parts / together < 2 * members || together * p.queries > kMostQueries)) {
    together /= 2;
  }
  return together;
}

// The index tensor [batch] or [batch, columns]: a missing dimension has stride 0.
IndexView<2> index_rows(const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int, "expected int32 or int64");
  IndexView<2> view;
  view.data = tensor.const_data_ptr();
  view.is_int64 = dtype == ScalarType::Long;
  view.stride[0] = tensor.stride(0);
  view.stride[1] = tensor.dim() == 2 ? tensor.stride(1) : 0;
  return view;
}

void read_cache(AttentionParams& p, const Cache& cache) {
  p.num_pages = cache.k.size(0);
  p.page_size = cache.k.size(1);
  p.num_kv_heads = cache.k.size(2);
  p.k = cache.k.const_data_ptr();
  p.v = cache.v.const_data_ptr();
  std::copy_n(cache.k.strides().data(), 3, p.k_stride);
  std::copy_n(cache.v.strides().data(), 3, p.v_stride);
  p.block_table = index_rows(cache.block_table);
  if (cache.block_table.dim() == 1) {
    p.block_table.stride[1] = p.block_table.stride[0];
    p.block_table.stride[0] = 0;
  }
  if (cache.k_scale) {
    p.k_scale = cache.k_scale->const_data_ptr<float>();
    p.k_scale_stride = cache.k_scale->numel() == 1 ? 0 : cache.k_scale->stride(0);
  }
  if (cache.v_scale) {
    p.v_scale = cache.v_scale->const_data_ptr<float>();
    p.v_scale_stride = cache.v_scale->numel() == 1 ? 0 : cache.v_scale->stride(0);
  }
}

}  // namespace

DraftAttention::DraftAttention(const Tensor& q, const Cache& cache, double sm_scale, double logits_soft_cap,
                               const Turn& turn, void* output)
    : q_type_(float_type(q)),
      kv_type_(element_type(cache.k)),
      members_(std::max<int64_t>(1, torch::stable::get_num_threads())),
      requests_(static_cast<size_t>(q.size(0))) {
  read_cache(p_, cache);
  p_.batch = q.size(0);
  p_.rows = q.size(1);
  p_.head_dim = q.size(3);
  p_.group = q.size(2) / p_.num_kv_heads;
  p_.queries = p_.rows * p_.group;
  p_.width = round_up(p_.head_dim, attention_ends().step);
  p_.sm_scale = static_cast<float>(sm_scale);
  p_.logits_soft_cap = static_cast<float>(logits_soft_cap);
  p_.norm_eps = static_cast<float>(turn.norm_eps);
  p_.paired = kv_type_ == 1 || kv_type_ == 2;
  p_.rounded = kv_type_ == 1 && attention_ends().pair_dot && p_.width == p_.head_dim;
  p_.query_width = p_.rounded ? p_.width / 2 : p_.width;
  p_.q = q.const_data_ptr();
  p_.output = output;
  std::copy_n(q.strides().data(), 3, p_.q_stride);
  if (turn.norm_weight) {
    p_.norm_weight = turn.norm_weight->const_data_ptr();
    p_.norm_is_float = is_float(*turn.norm_weight);
  }
  if (turn.inv_freq) {
    p_.inv_freq = turn.inv_freq->const_data_ptr<float>();
    p_.num_pairs = turn.inv_freq->numel();
    p_.positions = index_rows(*turn.positions);
  }
  parts_ = plan(cache, p_, requests_.data());
  together_ = heads_together(p_, parts_, members_);
  int64_t split_keys = 0;
  for (const AttentionRequest& request : requests_) {
    keys_ += request.end - request.begin;
    split_keys = std::max(split_keys, request.split_keys);
  }
  p_.score_stride = round_up(split_keys + kAttentionBlock, kVector);
  const int64_t attend_size = together_ * p_.queries * p_.score_stride + kAttentionBlock * p_.width;
  scratch_size_ = round_up(std::max(attend_size, 4 * p_.width), kVector);
}

void DraftAttention::place(Carver& carver) {
  p_.requests = requests_.data();
  p_.queries_ready = carver.take<float>(p_.batch * p_.num_kv_heads * p_.queries * p_.query_width);
  p_.partial = carver.take<float>(parts_ * p_.queries * p_.width);
  p_.partial_max = carver.take<float>(parts_ * p_.queries);
  p_.partial_sum = carver.take<float>(parts_ * p_.queries);
  scratch_ = carver.take<float>(members_ * scratch_size_);
}

int64_t DraftAttention::products() const { return 2 * keys_ * p_.num_kv_heads * p_.queries * p_.width; }

void DraftAttention::run(Member& member) const {
  const int64_t heads = p_.num_kv_heads;
  float* mine = scratch_ + member.index() * scratch_size_;
  member.each(p_.batch * p_.rows,
              [&](int64_t task) { attention_ends().prepare[q_type_](p_, task / p_.rows, task % p_.rows, mine); });
  member.each(parts_ / together_, [&](int64_t task) {
    const int64_t part = task * together_;
    const AttentionRequest* request = requests_.data();
    while (part >= request->first_part + request->splits * heads) {
      ++request;
    }
    const int64_t own = part - request->first_part;
    attention_kernels().attend[kv_type_](p_, request - requests_.data(), own % heads, together_, own / heads, mine);
  });
  const int64_t queries = heads * p_.queries;  // of a request
  member.each(p_.batch * queries, [&](int64_t task) {
    const int64_t b = task / queries;
    if (requests_[b].splits > 0) {
      attention_ends().merge[q_type_](p_, b, task % queries / p_.queries, task % p_.queries, mine);
    }
  });
}

namespace {

Tensor draft_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, double sm_scale,
                       std::optional<Tensor> kv_indptr, int64_t max_seq_len, int64_t window_left,
                       double logits_soft_cap, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                       std::optional<Tensor> q_norm_weight, double q_norm_eps, std::optional<Tensor> rope_inv_freq,
                       std::optional<Tensor> positions) {
  const Cache cache{k_cache,
                    v_cache,
                    block_table,
                    seq_lens,
                    kv_indptr ? &*kv_indptr : nullptr,
                    max_seq_len,
                    window_left,
                    k_scale ? &*k_scale : nullptr,
                    v_scale ? &*v_scale : nullptr};
  const Turn turn{q_norm_weight ? &*q_norm_weight : nullptr, q_norm_eps, rope_inv_freq ? &*rope_inv_freq : nullptr,
                  positions ? &*positions : nullptr};
  Tensor output = empty_of_dtype({q.size(0), q.size(1), q.size(2), q.size(3)}, q);
  if (output.numel() > 0) {
    DraftAttention program(q, cache, sm_scale, logits_soft_cap, turn, output.mutable_data_ptr());
    run_alone(program);
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
