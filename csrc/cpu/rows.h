// The rows of a tensor with any leading dimensions, and fresh tensors with the same ones.
#pragma once

#include <vector>

#include "launch.h"

namespace mtp::cpu {

// The place of a dtype in the tables of kernels: fp32, bf16, fp16, and fp8 (e4m3) of a head's weight or of a cache.
inline int element_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return 0;
    case ScalarType::BFloat16:
      return 1;
    case ScalarType::Half:
      return 2;
    default:
      STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float8_e4m3fn,
                      "expected float32, bfloat16, float16 or float8_e4m3fn");
      return 3;
  }
}

// The same, of what is multiplied: fp8 is none of them.
inline int float_type(const Tensor& tensor) {
  const int type = element_type(tensor);
  STD_TORCH_CHECK(type < 3, "expected float32, bfloat16 or float16");
  return type;
}

inline int64_t element_size(int type) { return type == 0 ? 4 : type == 3 ? 1 : 2; }

inline bool is_float(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float; }

// Where each row of a tensor [..., columns] begins.
struct Rows {
  int type;
  int64_t columns;
  int64_t count = 1;
  std::vector<const void*> at;

  explicit Rows(const Tensor& x) : type(float_type(x)), columns(x.size(x.dim() - 1)) {
    const int64_t leading = x.dim() - 1;
    const auto sizes = x.sizes();
    const auto strides = x.strides();
    for (int64_t i = 0; i < leading; ++i) {
      count *= sizes[i];
    }
    const char* data = static_cast<const char*>(x.const_data_ptr());
    at.resize(static_cast<size_t>(count));
    for (int64_t row = 0; row < count; ++row) {
      int64_t offset = 0;
      int64_t rest = row;
      for (int64_t i = leading; i-- > 0; rest /= sizes[i]) {
        offset += rest % sizes[i] * strides[i];
      }
      at[row] = data + offset * element_size(type);
    }
  }

  // Rows that lie one behind the other.
  Rows(const void* data, int type, int64_t count, int64_t columns) : type(type), columns(columns), count(count) {
    at.resize(static_cast<size_t>(count));
    for (int64_t row = 0; row < count; ++row) {
      at[row] = static_cast<const char*>(data) + row * columns * element_size(type);
    }
  }
};

// A contiguous tensor with the leading dimensions of x and a last one, left out if it is negative; not initialised.
inline Tensor empty_rows(const Tensor& x, int64_t last, int32_t dtype) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.pop_back();
  if (last >= 0) {
    sizes.push_back(last);
  }
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// The same, with the dtype of x.
inline Tensor empty_rows(const Tensor& x, int64_t last) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return empty_rows(x, last, dtype);
}

}  // namespace mtp::cpu
