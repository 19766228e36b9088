// What every CPU launcher needs from torch, through its stable ABI: views of inputs, fresh outputs, a parallel loop.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>

#include "mtp/views.h"

namespace mtp::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void copy_strides(const Tensor& tensor, int rank, int64_t* stride) {
  STD_TORCH_CHECK(tensor.dim() == rank, "expected ", rank, " dimensions, got ", tensor.dim());
  std::copy_n(tensor.strides().data(), rank, stride);
}

template <class T, int kRank>
View<const T, kRank> view(const Tensor& tensor) {
  View<const T, kRank> result;
  result.data = tensor.const_data_ptr<T>();
  copy_strides(tensor, kRank, result.stride);
  return result;
}

template <int kRank>
IndexView<kRank> index_view(const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int, "expected int32 or int64");
  IndexView<kRank> result;
  result.data = tensor.const_data_ptr();
  result.is_int64 = dtype == ScalarType::Long;
  copy_strides(tensor, kRank, result.stride);
  return result;
}

// A contiguous tensor, not initialised.
inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
  constexpr size_t kMaxRank = 4;
  STD_TORCH_CHECK(sizes.size() <= kMaxRank, "too many dimensions");
  int64_t strides[kMaxRank];
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes.begin()[i], 1);
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline Tensor empty_int64(std::initializer_list<int64_t> sizes) { return empty(sizes, aoti_torch_dtype_int64()); }

inline Tensor empty_float(std::initializer_list<int64_t> sizes) { return empty(sizes, aoti_torch_dtype_float32()); }

inline Tensor empty_bool(std::initializer_list<int64_t> sizes) { return empty(sizes, aoti_torch_dtype_bool()); }

inline Tensor empty_of_dtype(std::initializer_list<int64_t> sizes, const Tensor& like) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return empty(sizes, dtype);
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls body(begin, end) over parts of the batch on torch's threads; `work` is about how many values a request compares
// or adds, so that small batches stay on the calling thread.
template <class Body>
void for_requests(int64_t batch, int64_t work, const Body& body) {
  // tree_expand, 2 cores: 8192 candidates take 71 us on one thread and 49 us on two, 2048 take 22 us on one.
  constexpr int64_t kWorkPerThread = 4096;
  torch::stable::parallel_for(0, batch, std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(1, work)), body);
}

}  // namespace mtp::cpu
