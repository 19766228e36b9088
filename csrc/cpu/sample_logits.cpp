#include "mtp/sampling.h"

#include "heads.h"

MTP_KERNELS(SamplingKernels, sampling)

namespace mtp::cpu {
namespace {

struct SampleParams {
  int64_t rows;
  int64_t columns;
  int64_t chunks;
  int type;
  const char* logits;  // [rows, columns]
  int64_t logits_stride;
  View<const float, 1> temperature;  // [rows], stride 0 for one of all
  View<const int64_t, 1> seed;       // [rows]
  View<const int64_t, 1> offset;     // [rows]
  const char* token_ids;             // [rows, columns] or null
  int64_t ids_stride;                // in elements; 0 for one row of all
  bool ids_are_int64;
  float* largest;  // [rows, chunks]
  Draw* draws;     // [rows, chunks]

  int64_t chunk_size(int64_t chunk) const { return std::min(kSampleChunk, columns - chunk * kSampleChunk); }

  const void* chunk_logits(int64_t r, int64_t chunk) const {
    return logits + (r * logits_stride + chunk * kSampleChunk) * element_size(type);
  }
};

// [rows] or [1], read as [rows].
template <class T>
View<const T, 1> view_rows(const Tensor& tensor) {
  View<const T, 1> result = view<T, 1>(tensor);
  result.stride[0] = tensor.size(0) == 1 ? 0 : result.stride[0];
  return result;
}

Draw draw_chunk(const SampleParams& p, int64_t r, int64_t chunk) {
  const float temperature = p.temperature(r);
  const float* largest = p.largest + r * p.chunks;
  SampleChunkParams c{};
  c.logits = p.chunk_logits(r, chunk);
  c.count = p.chunk_size(chunk);
  c.largest = *std::max_element(largest, largest + p.chunks);
  c.warm = temperature > 0.0f;
  c.temperature = c.warm ? temperature : 1.0f;
  c.seed = p.seed(r);
  c.offset = p.offset(r);
  c.first = chunk * kSampleChunk;
  if (p.token_ids) {
    c.token_ids = p.token_ids + (r * p.ids_stride + c.first) * (p.ids_are_int64 ? 8 : 4);
    c.ids_are_int64 = p.ids_are_int64;
  }
  return sampling().sample_chunk[p.type](c);
}

// The best of a row's chunks, with the sum of them all.
Draw merge_chunks(const Draw* draws, int64_t chunks) {
  Draw best = draws[0];
  double sum = draws[0].sum;
  for (const Draw* next = draws + 1; next < draws + chunks; ++next) {
    sum += next->sum;
    if (next->noisy > best.noisy ||
        (next->noisy == best.noisy && std::tie(next->id, best.scaled) < std::tie(best.id, next->scaled))) {
      best = *next;
    }
  }
  best.sum = sum;
  return best;
}

std::tuple<Tensor, Tensor> sample_logits(Tensor logits, Tensor temperature, Tensor seed, Tensor offset,
                                         std::optional<Tensor> token_ids) {
  SampleParams p{};
  p.rows = logits.size(0);
  p.columns = logits.size(1);
  p.chunks = (p.columns + kSampleChunk - 1) / kSampleChunk;
  p.type = float_type(logits);
  STD_TORCH_CHECK(p.columns >= 1, "sample_logits: expected at least 1 column");
  p.logits = static_cast<const char*>(logits.const_data_ptr());
  p.logits_stride = logits.stride(0);
  p.temperature = view_rows<float>(temperature);
  p.seed = view_rows<int64_t>(seed);
  p.offset = view_rows<int64_t>(offset);
  if (token_ids) {
    p.token_ids = static_cast<const char*>(token_ids->const_data_ptr());
    p.ids_stride = token_ids->dim() == 2 ? token_ids->stride(0) : 0;
    p.ids_are_int64 = token_ids->scalar_type() == ScalarType::Long;
  }
  Tensor sampled_ids = empty_int64({p.rows});
  Tensor logprobs = empty_float({p.rows});
  int64_t* out_ids = data<int64_t>(sampled_ids);
  float* out = data<float>(logprobs);
  std::vector<float> largest(static_cast<size_t>(p.rows * p.chunks));
  std::vector<Draw> draws(largest.size());
  p.largest = largest.data();
  p.draws = draws.data();
  // What starting a thread costs is worth a few thousand columns of noise, and many more of a maximum.
  const int64_t columns = std::min(p.columns, kSampleChunk);
  torch::stable::parallel_for(0, p.rows * p.chunks, 1 + 32768 / columns, [&p](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / p.chunks;
      const int64_t chunk = task % p.chunks;
      p.largest[task] = sampling().largest[p.type](p.chunk_logits(r, chunk), p.chunk_size(chunk));
    }
  });
  torch::stable::parallel_for(0, p.rows * p.chunks, 1 + 4096 / columns, [&p](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      p.draws[task] = draw_chunk(p, task / p.chunks, task % p.chunks);
    }
  });
  for (int64_t r = 0; r < p.rows; ++r) {
    const Draw best = merge_chunks(p.draws + r * p.chunks, p.chunks);
    out_ids[r] = best.id;
    out[r] = logprob(best.scaled, static_cast<float>(std::log(best.sum)));
  }
  return {sampled_ids, logprobs};
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "sample_logits(Tensor logits, Tensor temperature, Tensor seed, Tensor offset, *, Tensor? token_ids=None)"
      " -> (Tensor sampled_ids, Tensor logprobs)");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("sample_logits", TORCH_BOX(&mtp::cpu::sample_logits)); }
