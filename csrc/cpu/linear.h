// The projections as programs of a team: rows packed, products, and what comes behind them. The ops run one of them, a
// whole draft step runs them all.
#pragma once

#include "mtp/linear.h"

#include "isa.h"
#include "rows.h"
#include "team.h"

MTP_KERNELS(LinearKernels, linear_kernels)
MTP_KERNELS(LinearRowsKernels, linear_rows_kernels)

namespace mtp::cpu {

inline int64_t packed_columns(int64_t columns) { return (columns + kPackedUnit - 1) / kPackedUnit * kPackedUnit; }

// kernel(params, begin, end) over all rows, some at a time.
template <class Params>
void rows_phase(Member& member, void (*kernel)(const Params&, int64_t, int64_t), const Params& params, int64_t rows,
                int64_t columns) {
  // 8 rows of 2048 and their product with E2B's down, bf16, 2 cores: 36 us with 4096, 37 us with 8192.
  constexpr int64_t kElementsPerTask = 4096;
  const int64_t some = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, columns));
  member.each((rows + some - 1) / some,
              [&](int64_t task) { kernel(params, task * some, std::min((task + 1) * some, rows)); });
}

// kernel(params, begin, end) over all columns of y, in whole groups of kWeightRows.
inline void columns_phase(Member& member, void (*kernel)(const LinearParams&, int64_t, int64_t),
                          const LinearParams& p) {
  if (p.rows == 0) {
    return;
  }
  // Of no great weight: from 8192 to 131072 E2B's gate and up take the same time within the noise (batch 1 and 8, bf16,
  // 2 cores).
  constexpr int64_t kElementsPerTask = 32768;
  const int64_t group = std::max<int64_t>(1, kWeightRows * p.segments * p.columns);
  const int64_t some = std::max<int64_t>(1, kElementsPerTask / group) * kWeightRows;
  member.each((p.out + some - 1) / some,
              [&](int64_t task) { kernel(p, task * some, std::min((task + 1) * some, p.out)); });
}

// Rows packed by `pack`, and products with them: y = kernel(x @ weight.T).
template <class PackParams>
struct Project {
  void (*pack)(const PackParams&, int64_t, int64_t);
  void (*multiply)(const LinearParams&, int64_t, int64_t);
  PackParams packing{};
  LinearParams linear{};

  // `out` columns of y come from weight, [out or 2 * out, segments * columns].
  void set_weight(const Tensor& weight, int64_t rows, int64_t columns, int64_t segments, int64_t out, void* y) {
    linear.segment_stride = packed_columns(columns);
    linear.packed_stride = segments * linear.segment_stride + kPackedPad;
    linear.segments = segments;
    linear.columns = columns;
    linear.rows = rows;
    linear.weight = weight.const_data_ptr();
    linear.weight_stride = weight.stride(0);
    linear.out = out;
    linear.y = y;
  }

  void place(Carver& carver) {
    float* packed = carver.take<float>(linear.rows * linear.packed_stride);
    linear.packed = packed;
    packing.packed = packed;
    packing.packed_stride = linear.packed_stride;
  }

  int64_t products() const { return linear.rows * linear.segments * linear.columns * linear.out; }

  void run(Member& member) const {
    rows_phase(member, pack, packing, linear.rows, linear.segments * linear.columns);
    columns_phase(member, multiply, linear);
  }
};

// y = f(norm(x) @ weight.T); without a norm_weight x is taken as it is.
struct NormProject : Project<NormRowsParams> {
  Rows rows;

  NormProject(Rows x, const Tensor* norm_weight, double eps, void* normed, const Tensor& weight, int64_t out, void* y)
      : rows(std::move(x)) {
    pack = linear_rows_kernels().norm[rows.type];
    multiply = linear_kernels().linear[rows.type];
    packing.columns = rows.columns;
    packing.eps = static_cast<float>(eps);
    packing.normed = normed;
    if (norm_weight) {
      packing.norm_weight = norm_weight->const_data_ptr();
      packing.norm_weight_is_float = is_float(*norm_weight);
    }
    set_weight(weight, rows.count, rows.columns, 1, out, y);
  }

  void place(Carver& carver) {
    packing.x = rows.at.data();
    Project::place(carver);
  }
};

// y = gelu(gate) * up.
struct NormGeglu : NormProject {
  NormGeglu(Rows x, const Tensor& norm_weight, double eps, const Tensor& gate_up_weight, void* y)
      : NormProject(std::move(x), &norm_weight, eps, nullptr, gate_up_weight, gate_up_weight.size(0) / 2, y) {
    multiply = linear_kernels().geglu[rows.type];
  }

  int64_t products() const { return 2 * NormProject::products(); }
};

// y = (residual + norm(x @ weight.T) * norm_weight) * scale; without a weight x is projected already.
struct LinearNormAdd {
  Rows rows;
  Rows residual;
  std::optional<NormProject> project;
  AddNormRowsParams add{};

  LinearNormAdd(Rows x, const Tensor* weight, const Tensor& norm_weight, double eps, Rows residual_rows,
                const Tensor* scale, void* y)
      : rows(std::move(x)), residual(std::move(residual_rows)) {
    if (weight) {
      project.emplace(rows, nullptr, eps, nullptr, *weight, weight->size(0), nullptr);
      project->multiply = linear_kernels().linear_float[rows.type];
    }
    add.norm_weight = norm_weight.const_data_ptr();
    add.norm_weight_is_float = is_float(norm_weight);
    add.eps = static_cast<float>(eps);
    if (scale) {
      add.scale = scale->const_data_ptr();
      add.scale_is_float = is_float(*scale);
    }
    add.columns = norm_weight.size(0);
    add.y = y;
  }

  void place(Carver& carver) {
    add.residual = residual.at.data();
    if (!project) {
      add.x = rows.at.data();
      return;
    }
    project->place(carver);
    float* projected = carver.take<float>(rows.count * add.columns);
    project->linear.y = projected;
    add.projected = projected;
  }

  int64_t products() const { return project ? project->products() : rows.count * add.columns; }

  void run(Member& member) const {
    if (project) {
      project->run(member);
    }
    rows_phase(member, linear_rows_kernels().add_norm[rows.type], add, rows.count, add.columns);
  }
};

// Where the rows of a step grow from. What the pointers lead to may be written until the program runs.
struct Origin {
  IndexView<2> token_ids;  // [batch, rows]
  int64_t batch, rows;
  const void* state = nullptr;  // [batch, prev_rows, columns], last dimension contiguous; null for none
  int64_t state_stride[2] = {};
  int64_t prev_rows = 0;
  std::optional<IndexView<2>> row_index;  // [batch, rows], into prev_rows; none: the row itself

  static Origin of(const Tensor& token_ids, const std::optional<Tensor>& state, const std::optional<Tensor>& row_index);
};

// y = concat(embedding of a token * scale, state) @ weight.T.
struct PreProject : Project<EmbedRowsParams> {
  Origin origin;
  const char* table;              // [vocab, columns]
  int64_t table_stride;           // in bytes
  int64_t vocab;                  // rows of the table
  int64_t vocab_start;            // the id of its first row
  int64_t element;                // bytes
  const void** embed = nullptr;   // [batch * rows]
  const void** states = nullptr;  // the same

  PreProject(const Origin& from, const Tensor& embed_weight, double embed_scale, const Tensor& weight, int64_t first_id,
             void* y);

  void place(Carver& carver);
  void run(Member& member) const;

 private:
  void find_rows() const;
};

}  // namespace mtp::cpu
