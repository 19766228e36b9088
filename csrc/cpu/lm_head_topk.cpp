#include "heads.h"

namespace mtp::cpu {
namespace {

struct Ranked {
  float value;
  int64_t id;

  bool operator<(const Ranked& other) const { return value > other.value || (value == other.value && id < other.id); }
};

// One row's results from those of its chunks, in the order of the chunks.
void finish_row(const LmHeadParams& p, int64_t r, std::vector<Ranked>& ranked, float* logprobs, int64_t* token_ids,
                float* logsumexp) {
  LogSum sum = p.sums[r * p.chunks];
  for (int64_t chunk = 1; chunk < p.chunks; ++chunk) {
    sum = heads().merge(sum, p.sums[r * p.chunks + chunk]);
  }
  *logsumexp = log_of(sum);
  ranked.clear();
  for (int64_t i = r * p.chunks * p.k; i < (r + 1) * p.chunks * p.k; ++i) {
    ranked.push_back({p.best[i], p.best_ids[i]});
  }
  std::partial_sort(ranked.begin(), ranked.begin() + p.k, ranked.end());
  for (int64_t i = 0; i < p.k; ++i) {
    logprobs[i] = logprob(ranked[i].value, *logsumexp);
    token_ids[i] = ranked[i].id;
  }
}

std::tuple<Tensor, Tensor, Tensor> lm_head_topk(Tensor normed, Tensor weight, int64_t k,
                                                std::optional<Tensor> weight_scale, std::optional<Tensor> token_map,
                                                int64_t vocab_start, double logits_soft_cap,
                                                std::optional<Tensor> suppress_ids) {
  const LeadingRows rows(normed);
  const int type = head_type(weight);
  LmHeadParams p{};
  p.x_stride = rows.padded();
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.hidden = rows.columns;
  p.vocab = weight.size(0);
  p.scale = weight_scale ? weight_scale->const_data_ptr<float>() : nullptr;
  if (token_map) {
    const IndexView<1> map = index_view<1>(*token_map);
    p.token_map = map.data;
    p.map_is_int64 = map.is_int64;
  }
  p.vocab_start = vocab_start;
  p.soft_cap = static_cast<float>(logits_soft_cap);
  const std::vector<int64_t> never = suppressed(suppress_ids);
  p.suppress_ids = never.data();
  p.num_suppressed = static_cast<int64_t>(never.size());
  p.k = k;
  p.chunks = (p.vocab + kLmHeadChunk - 1) / kLmHeadChunk;
  STD_TORCH_CHECK(k >= 1 && k <= p.vocab, "lm_head_topk: k is out of range");

  Tensor logprobs = empty_rows(rows, k, aoti_torch_dtype_float32());
  Tensor token_ids = empty_rows(rows, k, aoti_torch_dtype_int64());
  Tensor logsumexp = empty_rows(rows, -1, aoti_torch_dtype_float32());
  const int64_t most = std::min(rows.count, kHeadRows);
  Tensor x = empty_float({most, p.x_stride});
  Tensor best = empty_float({most, p.chunks, k});
  Tensor best_ids = empty_int64({most, p.chunks, k});
  std::vector<LogSum> sums(static_cast<size_t>(most * p.chunks));
  p.x = data<float>(x);
  p.best = data<float>(best);
  p.best_ids = data<int64_t>(best_ids);
  p.sums = sums.data();
  float* out = data<float>(logprobs);
  int64_t* out_ids = data<int64_t>(token_ids);
  float* totals = data<float>(logsumexp);
  for (int64_t begin = 0; begin < rows.count; begin += kHeadRows) {
    p.rows = std::min(kHeadRows, rows.count - begin);
    rows.widen(begin, begin + p.rows, type, data<float>(x));
    torch::stable::parallel_for(0, p.chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        heads().lm_head_chunk[type](p, chunk);
      }
    });
    std::vector<Ranked> ranked;
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t row = begin + r;
      finish_row(p, r, ranked, out + row * k, out_ids + row * k, totals + row);
    }
  }
  return {logprobs, token_ids, logsumexp};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "lm_head_topk(Tensor normed, Tensor weight, SymInt k, *, Tensor? weight_scale=None, Tensor? token_map=None,"
      " SymInt vocab_start=0, float logits_soft_cap=0.0, Tensor? suppress_ids=None) -> (Tensor logprobs,"
      " Tensor token_ids, Tensor logsumexp)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("lm_head_topk", TORCH_BOX(&mtp::cpu::lm_head_topk)); }
