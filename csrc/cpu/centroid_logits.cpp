#include "centroids.h"

namespace mtp::cpu {

CentroidHead::CentroidHead(Rows normed, const Tensor& centroid_weight, const Tensor& ordering,
                           const Tensor& lm_head_weight, int64_t active, bool ordered,
                           const std::optional<Tensor>& suppress_ids)
    : head(std::move(normed), float_type(centroid_weight)),
      type(head.weight_type),
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

void CentroidHead::place(Carver& carver) {
  head.place(carver);
  scores = carver.take<float>(head.most() * num_centroids);
  chosen_score = carver.take<float>(head.most() * num_active);
  chosen = carver.take<int64_t>(head.most() * num_active);
}

void CentroidHead::candidates_of(Member& member, int64_t begin, int64_t end, float* logits, int64_t* ids) const {
  constexpr int64_t kCentroidsPerTask = 64;
  constexpr int64_t kLine = 64;  // bytes
  const HeadKernels& kernels = heads();
  const int64_t count = end - begin;
  const int64_t hidden = head.rows.columns;
  const int64_t element = element_size(type);
  head.widen(member, begin, end);
  // Every product is one sum in an order of its own, so how the work is shared out changes no bits.
  member.each((num_centroids + kCentroidsPerTask - 1) / kCentroidsPerTask, [&](int64_t task) {
    const int64_t from = task * kCentroidsPerTask;
    const int64_t some = std::min(kCentroidsPerTask, num_centroids - from);
    kernels.dots[type]({head.x, head.padded(), count, centroids + from * centroid_stride * element, centroid_stride,
                        hidden, nullptr, some, scores + from, num_centroids, nullptr, 0});
  });
  member.each(count, [&](int64_t r) {
    kernels.best(scores + r * num_centroids, nullptr, num_centroids, num_active, chosen_score + r * num_active,
                 chosen + r * num_active);
  });
  const int64_t tasks = count * num_active;
  const char* ordering = static_cast<const char*>(token_ordering.data);
  const int64_t step = token_ordering.stride[0] * (token_ordering.is_int64 ? 8 : 4);  // bytes
  const auto find_tokens = [&](int64_t task, int64_t some, int64_t* tokens) {
    for (int64_t i = 0; i < some; ++i) {
      tokens[i] = std::clamp<int64_t>(token_ordering(chosen[task] * size + i), 0, vocab - 1);
    }
  };
  member.each(tasks, [&](int64_t task) {
    const int64_t r = task / num_active;
    const int64_t place = chosen[task] * size;
    int64_t* tokens = ids + task * size;
    find_tokens(task, size, tokens);
    // Most likely this thread's next tasks: the ordering of the one behind them, and the rows that the next begins
    // with, from where this one's are counted.
    int64_t behind[kHeadTile];
    const int64_t num_behind = task + 1 == tasks ? 0 : std::min(size, kHeadTile);
    if (centroid_ordered) {
      for (int64_t i = 0; i < num_behind; ++i) {
        behind[i] = (chosen[task + 1] - chosen[task]) * size + i;
      }
    } else {
      find_tokens(task + 1, num_behind, behind);
    }
    const char* next = ordering + (task + 2 < tasks ? chosen[task + 2] * size * step : 0);
    for (int64_t i = 0; i < size * step; i += kLine) {
      __builtin_prefetch(next + i);
    }
    const char* weights = centroid_ordered ? weight + place * weight_stride * element : weight;
    kernels.dots[type]({head.x + r * head.padded(), head.padded(), 1, weights, weight_stride, hidden,
                        centroid_ordered ? nullptr : tokens, size, logits + task * size, size, behind, num_behind});
    for (const int64_t id : never) {
      for (int64_t i = 0; i < size; ++i) {
        float& logit = logits[task * size + i];
        logit = tokens[i] == id ? -std::numeric_limits<float>::infinity() : logit;
      }
    }
  });
}

namespace {

struct CentroidLogits {
  CentroidHead head;
  float* logits;
  int64_t* ids;

  int64_t products() const { return head.products(); }
  void place(Carver& carver) { head.place(carver); }
  void run(Member& member) const {
    const int64_t rows = head.head.rows.count;
    for (int64_t begin = 0; begin < rows; begin += kHeadRows) {
      const int64_t offset = begin * head.candidates();
      head.candidates_of(member, begin, std::min(begin + kHeadRows, rows), logits + offset, ids + offset);
    }
  }
};

std::tuple<Tensor, Tensor> centroid_logits(Tensor normed, Tensor centroid_weight, Tensor token_ordering,
                                           Tensor lm_head_weight, int64_t num_active, bool centroid_ordered,
                                           std::optional<Tensor> suppress_ids) {
  CentroidHead head(Rows(normed), centroid_weight, token_ordering, lm_head_weight, num_active, centroid_ordered,
                    suppress_ids);
  Tensor logits = empty_rows(normed, head.candidates(), aoti_torch_dtype_float32());
  Tensor token_ids = empty_rows(normed, head.candidates(), aoti_torch_dtype_int64());
  CentroidLogits program{std::move(head), data<float>(logits), data<int64_t>(token_ids)};
  run_alone(program);
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
