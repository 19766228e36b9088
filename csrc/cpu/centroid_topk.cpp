#include "centroids.h"

namespace mtp::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor> centroid_topk(Tensor normed, Tensor centroid_weight, Tensor token_ordering,
                                                 Tensor lm_head_weight, int64_t num_active, int64_t k,
                                                 bool centroid_ordered, std::optional<Tensor> suppress_ids) {
  const CentroidHead head(normed, centroid_weight, token_ordering, lm_head_weight, num_active, centroid_ordered,
                          suppress_ids);
  const int64_t candidates = head.candidates();
  STD_TORCH_CHECK(k >= 1 && k <= candidates, "centroid_topk: k is out of range");
  Tensor logprobs = empty_rows(head.rows, k, aoti_torch_dtype_float32());
  Tensor token_ids = empty_rows(head.rows, k, aoti_torch_dtype_int64());
  Tensor logsumexp = empty_rows(head.rows, -1, aoti_torch_dtype_float32());
  const int64_t most = std::min(head.rows.count, kHeadRows);
  Tensor logit_rows = empty_float({most, candidates});
  Tensor id_rows = empty_int64({most, candidates});
  const float* logits = data<float>(logit_rows);
  const int64_t* ids = data<int64_t>(id_rows);
  float* out = data<float>(logprobs);
  int64_t* out_ids = data<int64_t>(token_ids);
  float* totals = data<float>(logsumexp);
  for (int64_t begin = 0; begin < head.rows.count; begin += kHeadRows) {
    const int64_t end = std::min(begin + kHeadRows, head.rows.count);
    head.candidates_of(begin, end, data<float>(logit_rows), data<int64_t>(id_rows));
    torch::stable::parallel_for(begin, end, 4, [&](int64_t first, int64_t last) {
      std::vector<uint64_t> keys(static_cast<size_t>(candidates));
      for (int64_t r = first; r < last; ++r) {
        const int64_t offset = (r - begin) * candidates;
        totals[r] = log_of(heads().log_sum(logits + offset, candidates));
        for (int64_t i = 0; i < candidates; ++i) {
          keys[i] = rank_key(logits[offset + i], ids[offset + i]);
        }
        std::partial_sort(keys.begin(), keys.begin() + k, keys.end());
        for (int64_t i = 0; i < k; ++i) {
          out[r * k + i] = logprob(key_value(keys[i]), totals[r]);
          out_ids[r * k + i] = key_id(keys[i]);
        }
      }
    });
  }
  return {logprobs, token_ids, logsumexp};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "centroid_topk(Tensor normed, Tensor centroid_weight, Tensor token_ordering, Tensor lm_head_weight,"
      " SymInt num_active, SymInt k, *, bool centroid_ordered=False, Tensor? suppress_ids=None) -> (Tensor logprobs,"
      " Tensor token_ids, Tensor logsumexp)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("centroid_topk", TORCH_BOX(&mtp::cpu::centroid_topk)); }
