#include "centroids.h"

namespace mtp::cpu {

CentroidHead::CentroidHead(const Tensor& normed, const Tensor& centroid_weight, const Tensor& ordering,
                           const Tensor& lm_head_weight, int64_t active, bool ordered,
                           const std::optional<Tensor>& suppress_ids)
    : rows(normed),
      type(rows.type),
      centroids(static_cast<const char*>(centroid_weight.const_data_ptr())),
      centroid_stride(centroid_weight.stride(0)),
      num_centroids(centroid_weight.size(0)),
      token_ordering(index_view<1>(ordering)),
      weight(static_cast<const char*>(lm_head_weight.const_data_ptr())),
      weight_stride(lm_head_weight.stride(0)),
      vocab(lm_head_weight.size(0)),
      num_active(active),
      size(num_centroids > 0 ? vocab / num_centroids : 0),
      centroid_ordered(ordered),
      never(suppressed(suppress_ids)) {
  STD_TORCH_CHECK(active >= 1 && active <= num_centroids && ordering.size(0) == vocab, "wrong sizes");
}

void CentroidHead::candidates_of(int64_t begin, int64_t end, float* logits, int64_t* ids) const {
  constexpr int64_t kCentroidsPerTask = 64;
  const HeadKernels& kernels = heads();
  const int64_t count = end - begin;
  const int64_t hidden = rows.columns;
  const int64_t element = element_size(type);
  Tensor x_rows = empty_float({count, rows.padded()});
  Tensor score_rows = empty_float({count, num_centroids});
  float* x = data<float>(x_rows);
  float* scores = data<float>(score_rows);
  std::vector<int64_t> chosen(static_cast<size_t>(count * num_active));
  rows.widen(begin, end, type, x);

  // Every product is one sum in an order of its own, so how the work is shared out changes no bits.
  torch::stable::parallel_for(
      0, (num_centroids + kCentroidsPerTask - 1) / kCentroidsPerTask, 1, [&](int64_t first, int64_t last) {
        const int64_t from = first * kCentroidsPerTask;
        const int64_t to = std::min(last * kCentroidsPerTask, num_centroids);
        kernels.dots[type]({x, rows.padded(), count, centroids + from * centroid_stride * element, centroid_stride,
                            hidden, nullptr, to - from, scores + from, num_centroids});
      });
  torch::stable::parallel_for(0, count, 8, [&](int64_t first, int64_t last) {
    std::vector<uint64_t> keys(static_cast<size_t>(num_centroids));
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0; c < num_centroids; ++c) {
        keys[c] = rank_key(scores[r * num_centroids + c], c);
      }
      std::partial_sort(keys.begin(), keys.begin() + num_active, keys.end());
      std::transform(keys.begin(), keys.begin() + num_active, chosen.begin() + r * num_active, key_id);
    }
  });
  torch::stable::parallel_for(0, count * num_active, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t r = task / num_active;
      const int64_t place = chosen[task] * size;
      int64_t* tokens = ids + task * size;
      for (int64_t i = 0; i < size; ++i) {
        tokens[i] = std::clamp<int64_t>(token_ordering(place + i), 0, vocab - 1);
      }
      const char* weights = centroid_ordered ? weight + place * weight_stride * element : weight;
      kernels.dots[type]({x + r * rows.padded(), rows.padded(), 1, weights, weight_stride, hidden,
                          centroid_ordered ? nullptr : tokens, size, logits + task * size, size});
      for (const int64_t id : never) {
        for (int64_t i = 0; i < size; ++i) {
          float& logit = logits[task * size + i];
          logit = tokens[i] == id ? -std::numeric_limits<float>::infinity() : logit;
        }
      }
    }
  });
}

namespace {

std::tuple<Tensor, Tensor> centroid_logits(Tensor normed, Tensor centroid_weight, Tensor token_ordering,
                                           Tensor lm_head_weight, int64_t num_active, bool centroid_ordered,
                                           std::optional<Tensor> suppress_ids) {
  const CentroidHead head(normed, centroid_weight, token_ordering, lm_head_weight, num_active, centroid_ordered,
                          suppress_ids);
  Tensor logits = empty_rows(head.rows, head.candidates(), aoti_torch_dtype_float32());
  Tensor token_ids = empty_rows(head.rows, head.candidates(), aoti_torch_dtype_int64());
  for (int64_t begin = 0; begin < head.rows.count; begin += kHeadRows) {
    const int64_t offset = begin * head.candidates();
    head.candidates_of(begin, std::min(begin + kHeadRows, head.rows.count), data<float>(logits) + offset,
                       data<int64_t>(token_ids) + offset);
  }
  return {logits, token_ids};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "centroid_logits(Tensor normed, Tensor centroid_weight, Tensor token_ordering, Tensor lm_head_weight,"
      " SymInt num_active, *, bool centroid_ordered=False, Tensor? suppress_ids=None) -> (Tensor logits,"
      " Tensor token_ids)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("centroid_logits", TORCH_BOX(&mtp::cpu::centroid_logits)); }
