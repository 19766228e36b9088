#include "linear.h"

namespace mtp::cpu {
namespace {

// The rows of the table that the ids name, null for an id that this shard of the vocabulary does not hold.
std::vector<const void*> embed_rows(const Tensor& token_ids, const Tensor& embed_weight, int64_t vocab_start) {
  const IndexView<2> ids = index_view<2>(token_ids);
  const int64_t batch = token_ids.size(0);
  const int64_t rows = token_ids.size(1);
  const int64_t vocab = embed_weight.size(0);
  const int64_t stride = embed_weight.stride(0) * static_cast<int64_t>(embed_weight.element_size());
  const char* table = static_cast<const char*>(embed_weight.const_data_ptr());
  std::vector<const void*> pointers(batch * rows);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t id = ids(b, row);
      // The difference is taken only where id >= vocab_start >= 0, so it cannot overflow.
      const bool present = id >= vocab_start && id - vocab_start < vocab;
      pointers[b * rows + row] = present ? table + (id - vocab_start) * stride : nullptr;
    }
  }
  return pointers;
}

// The row of state that each row grows from.
std::vector<const void*> state_rows(const Tensor& state, int64_t rows, const std::optional<Tensor>& row_index) {
  const IndexView<2> index = row_index ? index_view<2>(*row_index) : IndexView<2>();
  const int64_t batch = state.size(0);
  const int64_t last = state.size(1) - 1;
  const int64_t size = static_cast<int64_t>(state.element_size());
  const char* data = static_cast<const char*>(state.const_data_ptr());
  std::vector<const void*> pointers(batch * rows);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = row_index ? std::clamp<int64_t>(index(b, row), 0, last) : row;
      pointers[b * rows + row] = data + (b * state.stride(0) + from * state.stride(1)) * size;
    }
  }
  return pointers;
}

}  // namespace

PreProject::PreProject(const Tensor& token_ids, const Tensor& embed_weight, double embed_scale,
                       const std::optional<Tensor>& state, const Tensor& weight, const std::optional<Tensor>& row_index,
                       int64_t vocab_start, void* y)
    : embed(embed_rows(token_ids, embed_weight, vocab_start)) {
  const int type = float_type(embed_weight);
  pack = linear_rows_kernels().embed[type];
  multiply = linear_kernels().linear[type];
  if (state) {
    states = state_rows(*state, token_ids.size(1), row_index);
  }
  packing.embed_scale = static_cast<float>(embed_scale);
  packing.columns = embed_weight.size(1);
  linear.exact = true;
  set_weight(weight, token_ids.size(0) * token_ids.size(1), packing.columns, state ? 2 : 1, weight.size(0), y);
  packing.segment_stride = linear.segment_stride;
}

void PreProject::place(Carver& carver) {
  packing.embed = embed.data();
  packing.state = linear.segments == 2 ? states.data() : nullptr;
  Project::place(carver);
}

namespace {

Tensor pre_project(Tensor token_ids, Tensor embed_weight, double embed_scale, std::optional<Tensor> state,
                   Tensor weight, std::optional<Tensor> row_index, int64_t vocab_start) {
  Tensor y = empty_of_dtype({token_ids.size(0), token_ids.size(1), weight.size(0)}, embed_weight);
  PreProject program(token_ids, embed_weight, embed_scale, state, weight, row_index, vocab_start, y.mutable_data_ptr());
  run_alone(program);
  return y;
}

}  // namespace
}  // namespace mtp::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(mtp_cpu, m) {
  m.def(
      "pre_project(Tensor token_ids, Tensor embed_weight, float embed_scale, Tensor? state, Tensor weight, *, "
      "Tensor? row_index=None, SymInt vocab_start=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mtp_cpu, CPU, m) { m.impl("pre_project", TORCH_BOX(&mtp::cpu::pre_project)); }
