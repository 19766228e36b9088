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

Tensor pre_project(Tensor token_ids, Tensor embed_weight, double embed_scale, std::optional<Tensor> state,
                   Tensor weight, std::optional<Tensor> row_index, int64_t vocab_start) {
  const int64_t batch = token_ids.size(0);
  const int64_t rows = token_ids.size(1);
  const int64_t backbone = embed_weight.size(1);
  const int64_t segments = state ? 2 : 1;
  const std::vector<const void*> embed = embed_rows(token_ids, embed_weight, vocab_start);
  std::vector<const void*> states;
  const Tensor workspace = packed_workspace(batch * rows, backbone, segments);
  Tensor y = empty_of_dtype({batch, rows, weight.size(0)}, embed_weight);
  const LinearParams linear = linear_params(weight, batch * rows, backbone, segments, workspace, y);
  EmbedRowsParams p{};
  p.embed = embed.data();
  if (state) {
    states = state_rows(*state, rows, row_index);
    p.state = states.data();
  }
  p.embed_scale = static_cast<float>(embed_scale);
  p.columns = backbone;
  p.packed = data<float>(workspace);
  p.packed_stride = linear.packed_stride;
  p.segment_stride = linear.segment_stride;
  const int type = element_type(embed_weight);
  for_rows(linear_rows_kernels().embed[type], p, batch * rows, segments * backbone);
  for_columns(linear_kernels().linear[type], linear);
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
