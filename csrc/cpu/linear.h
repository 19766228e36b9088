// What the launchers of the projections share: rows of any leading dimensions, the packed workspace, parallel loops.
#pragma once

#include "mtp/linear.h"

#include <vector>

#include "isa.h"
#include "launch.h"

MTP_KERNELS(LinearKernels, linear_kernels)
MTP_KERNELS(LinearRowsKernels, linear_rows_kernels)

namespace mtp::cpu {

// Where the tables of mtp/linear.h have the kernels of a type.
inline int element_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return 0;
    case ScalarType::BFloat16:
      return 1;
    case ScalarType::Half:
      return 2;
    default:
      STD_TORCH_CHECK(false, "expected bfloat16, float16 or float32");
  }
}

inline bool is_float(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float; }

// Where each row of x, [..., columns], begins.
inline std::vector<const void*> row_pointers(const Tensor& x) {
  const int64_t leading = x.dim() - 1;
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  const int64_t size = static_cast<int64_t>(x.element_size());
  int64_t rows = 1;
  for (int64_t i = 0; i < leading; ++i) {
    rows *= sizes[i];
  }
  const char* data = static_cast<const char*>(x.const_data_ptr());
  std::vector<const void*> pointers(rows);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t offset = 0;
    int64_t rest = row;
    for (int64_t i = leading; i-- > 0;) {
      offset += rest % sizes[i] * strides[i];
      rest /= sizes[i];
    }
    pointers[row] = data + offset * size;
  }
  return pointers;
}

// A contiguous tensor with the leading dimensions and the dtype of x, not initialised.
inline Tensor empty_rows(const Tensor& x, int64_t columns) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline int64_t packed_columns(int64_t columns) { return (columns + kPackedUnit - 1) / kPackedUnit * kPackedUnit; }

// Calls kernel(params, begin, end) over parts of the rows.
template <class Params>
void for_rows(void (*kernel)(const Params&, int64_t, int64_t), const Params& params, int64_t rows, int64_t columns) {
  for_requests(rows, columns, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

// Calls kernel(params, begin, end) over parts of the columns of y. Each thread gets whole groups of kWeightRows, and
// enough of them to be worth a thread.
inline void for_columns(void (*kernel)(const LinearParams&, int64_t, int64_t), const LinearParams& p) {
  if (p.rows == 0) {
    return;
  }
  // One row of 256, bf16, 2 cores: 196608 products take 9 us on one thread and 7 on two; 65536 take 2 us on one.
  constexpr int64_t kProductsPerThread = 65536;
  const int64_t work = std::max<int64_t>(1, kWeightRows * p.segments * p.columns * p.rows);
  const int64_t groups = (p.out + kWeightRows - 1) / kWeightRows;
  torch::stable::parallel_for(
      0, groups, std::max<int64_t>(1, kProductsPerThread / work),
      [&](int64_t begin, int64_t end) { kernel(p, begin * kWeightRows, std::min(end * kWeightRows, p.out)); });
}

// The params of y = x @ weight.T for x of `rows` rows in one piece, with a workspace that the caller keeps and fills.
inline LinearParams linear_params(const Tensor& weight, int64_t rows, int64_t columns, int64_t segments,
                                  const Tensor& workspace, const Tensor& y) {
  LinearParams p{};
  p.packed = data<float>(workspace);
  p.segment_stride = packed_columns(columns);
  p.packed_stride = segments * p.segment_stride;
  p.segments = segments;
  p.columns = columns;
  p.rows = rows;
  p.weight = weight.const_data_ptr();
  p.weight_stride = weight.stride(0);
  p.out = weight.size(0);
  p.y = y.mutable_data_ptr();
  return p;
}

inline Tensor packed_workspace(int64_t rows, int64_t columns, int64_t segments) {
  return empty_float({rows, segments * packed_columns(columns)});
}

// Packs the rows of x: normed, or as they are without a norm_weight; `normed` takes them rounded.
inline void pack_rows(const Tensor& x, const std::vector<const void*>& rows, const Tensor* norm_weight, double eps,
                      const Tensor& workspace, const Tensor* normed) {
  NormRowsParams p{};
  p.x = rows.data();
  p.columns = x.size(-1);
  p.eps = static_cast<float>(eps);
  p.packed = data<float>(workspace);
  p.packed_stride = packed_columns(p.columns);
  if (norm_weight) {
    p.norm_weight = norm_weight->const_data_ptr();
    p.norm_weight_is_float = is_float(*norm_weight);
  }
  if (normed) {
    p.normed = normed->mutable_data_ptr();
  }
  for_rows(linear_rows_kernels().norm[element_type(x)], p, static_cast<int64_t>(rows.size()), p.columns);
}

}  // namespace mtp::cpu
