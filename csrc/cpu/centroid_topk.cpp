#include "centroids.h"

namespace mtp::cpu {

void CentroidTopK::place(Carver& carver) {
  head.place(carver);
  const int64_t most = head.head.most();
  logits = carver.take<float>(most * head.candidates());
  ids = carver.take<int64_t>(most * head.candidates());
  best = carver.take<float>(most * top.k);
  best_ids = carver.take<int64_t>(most * top.k);
}

void CentroidTopK::run(Member& member) const {
  const int64_t rows = head.head.rows.count;
  const int64_t candidates = head.candidates();
  for (int64_t begin = 0; begin < rows; begin += kHeadRows) {
    const int64_t count = std::min(kHeadRows, rows - begin);
    head.candidates_of(member, begin, begin + count, logits, ids);
    member.each(count, [&](int64_t r) {
      const float* values = logits + r * candidates;
      heads().best(values, ids + r * candidates, candidates, top.k, best + r * top.k, best_ids + r * top.k);
      finish_row(top, begin + r, best + r * top.k, best_ids + r * top.k, heads().log_sum(values, candidates));
    });
  }
}

namespace {

std::tuple<Tensor, Tensor, Tensor> centroid_topk(Tensor normed, Tensor centroid_weight, Tensor token_ordering,
                                                 Tensor lm_head_weight, int64_t num_active, int64_t k,
                                                 bool centroid_ordered, std::optional<Tensor> suppress_ids) {
  CentroidHead head(Rows(normed), centroid_weight, token_ordering, lm_head_weight, num_active, centroid_ordered,
                    suppress_ids);
  STD_TORCH_CHECK(k >= 1 && k <= head.candidates(), "centroid_topk: k is out of range");
  Tensor logprobs = empty_rows(normed, k, aoti_torch_dtype_float32());
  Tensor token_ids = empty_rows(normed, k, aoti_torch_dtype_int64());
  Tensor logsumexp = empty_rows(normed, -1, aoti_torch_dtype_float32());
  CentroidTopK program(std::move(head), {k, data<float>(logprobs), data<int64_t>(token_ids), data<float>(logsumexp)});
  run_alone(program);
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
