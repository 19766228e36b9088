#include "lm_head.h"

namespace mtp::cpu {

LmHeadTopK::LmHeadTopK(Rows normed, const Tensor& weight, const Tensor* weight_scale, const Tensor* token_map,
                       int64_t vocab_start, double logits_soft_cap, std::vector<int64_t> suppressed_ids, TopK results)
    : head(std::move(normed), element_type(weight)), top(results), never(std::move(suppressed_ids)) {
  p.x_stride = head.padded();
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.hidden = head.rows.columns;
  p.vocab = weight.size(0);
  p.scale = weight_scale ? weight_scale->const_data_ptr<float>() : nullptr;
  if (token_map) {
    const IndexView<1> map = index_view<1>(*token_map);
    p.token_map = map.data;
    p.map_is_int64 = map.is_int64;
  }
  p.vocab_start = vocab_start;
  p.soft_cap = static_cast<float>(logits_soft_cap);
  p.k = top.k;
  p.chunks = (p.vocab + kLmHeadChunk - 1) / kLmHeadChunk;
  STD_TORCH_CHECK(p.k >= 1 && p.k <= p.vocab, "lm_head_topk: k is out of range");
}

void LmHeadTopK::place(Carver& carver) {
  head.place(carver);
  p.x = head.x;
  p.best = carver.take<float>(head.most() * p.chunks * p.k);
  p.best_ids = carver.take<int64_t>(head.most() * p.chunks * p.k);
  p.sums = carver.take<LogSum>(head.most() * p.chunks);
  ranked = carver.take<float>(head.most() * p.k);
  ranked_ids = carver.take<int64_t>(head.most() * p.k);
}

void LmHeadTopK::run(Member& member) const {
  for (int64_t begin = 0; begin < head.rows.count; begin += kHeadRows) {
    LmHeadParams pass = p;
    pass.suppress_ids = never.data();
    pass.num_suppressed = static_cast<int64_t>(never.size());
    pass.rows = std::min(kHeadRows, head.rows.count - begin);
    head.widen(member, begin, begin + pass.rows);
    member.each(pass.chunks, [&](int64_t chunk) { heads().lm_head_chunk[head.weight_type](pass, chunk); });
    member.each(pass.rows, [&](int64_t r) {
      LogSum sum = pass.sums[r * pass.chunks];  // merged in the order of the chunks
      for (int64_t chunk = 1; chunk < pass.chunks; ++chunk) {
        sum = heads().merge(sum, pass.sums[r * pass.chunks + chunk]);
      }
      const int64_t first = r * pass.chunks * pass.k;
      heads().best(pass.best + first, pass.best_ids + first, pass.chunks * pass.k, pass.k, ranked + r * pass.k,
                   ranked_ids + r * pass.k);
      finish_row(top, begin + r, ranked + r * pass.k, ranked_ids + r * pass.k, sum);
    });
  }
}

namespace {

std::tuple<Tensor, Tensor, Tensor> lm_head_topk(Tensor normed, Tensor weight, int64_t k,
                                                std::optional<Tensor> weight_scale, std::optional<Tensor> token_map,
                                                int64_t vocab_start, double logits_soft_cap,
                                                std::optional<Tensor> suppress_ids) {
  Tensor logprobs = empty_rows(normed, k, aoti_torch_dtype_float32());
  Tensor token_ids = empty_rows(normed, k, aoti_torch_dtype_int64());
  Tensor logsumexp = empty_rows(normed, -1, aoti_torch_dtype_float32());
  LmHeadTopK program(Rows(normed), weight, weight_scale ? &*weight_scale : nullptr, token_map ? &*token_map : nullptr,
                     vocab_start, logits_soft_cap, suppressed(suppress_ids),
                     {k, data<float>(logprobs), data<int64_t>(token_ids), data<float>(logsumexp)});
  run_alone(program);
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
