#include "linear.h"

namespace mtp::cpu {

Origin Origin::of(const Tensor& token_ids, const std::optional<Tensor>& state, const std::optional<Tensor>& row_index) {
  Origin origin;
  origin.token_ids = index_view<2>(token_ids);
  origin.batch = token_ids.size(0);
  origin.rows = token_ids.size(1);
  if (state) {
    origin.state = state->const_data_ptr();
    origin.state_stride[0] = state->stride(0);
    origin.state_stride[1] = state->stride(1);
    origin.prev_rows = state->size(1);
  }
  if (row_index) {
    origin.row_index = index_view<2>(*row_index);
  }
  return origin;
}

PreProject::PreProject(const Origin& from, const Tensor& embed_weight, double embed_scale, const Tensor& weight,
                       int64_t first_id, void* y)
    : origin(from),
      table(static_cast<const char*>(embed_weight.const_data_ptr())),
      vocab(embed_weight.size(0)),
      vocab_start(first_id),
      element(element_size(float_type(embed_weight))) {
  const int type = float_type(embed_weight);
  table_stride = embed_weight.stride(0) * element;
  pack = linear_rows_kernels().embed[type];
  multiply = linear_kernels().linear[type];
  packing.embed_scale = static_cast<float>(embed_scale);
  packing.columns = embed_weight.size(1);
  set_weight(weight, origin.batch * origin.rows, packing.columns, origin.state ? 2 : 1, weight.size(0), y);
  packing.segment_stride = linear.segment_stride;
}

void PreProject::place(Carver& carver) {
  embed = carver.take<const void*>(linear.rows);
  states = origin.state ? carver.take<const void*>(linear.rows) : nullptr;
  packing.embed = embed;
  packing.state = states;
  Project::place(carver);
}

void PreProject::run(Member& member) const {
  member.each(1, [this](int64_t) { find_rows(); });
  Project::run(member);
}

// The row of the table that each id names, null for an id that this shard of the vocabulary does not hold; and the row
// of state that each row grows from.
void PreProject::find_rows() const {
  const Origin& o = origin;
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t row = 0; row < o.rows; ++row) {
      const int64_t id = o.token_ids(b, row);
      // The difference is taken only where id >= vocab_start >= 0, so it cannot overflow.
      const bool present = id >= vocab_start && id - vocab_start < vocab;
      embed[b * o.rows + row] = present ? table + (id - vocab_start) * table_stride : nullptr;
      if (o.state) {
        const int64_t from = o.row_index ? std::clamp<int64_t>((*o.row_index)(b, row), 0, o.prev_rows - 1) : row;
        states[b * o.rows + row] =
            static_cast<const char*>(o.state) + (b * o.state_stride[0] + from * o.state_stride[1]) * element;
      }
    }
  }
}

namespace {

Tensor pre_project(Tensor token_ids, Tensor embed_weight, double embed_scale, std::optional<Tensor> state,
                   Tensor weight, std::optional<Tensor> row_index, int64_t vocab_start) {
  Tensor y = empty_of_dtype({token_ids.size(0), token_ids.size(1), weight.size(0)}, embed_weight);
  PreProject program(Origin::of(token_ids, state, row_index), embed_weight, embed_scale, weight, vocab_start,
                     y.mutable_data_ptr());
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
