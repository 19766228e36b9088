// What the launchers of CUDA kernels need from torch, through its stable ABI: checks of tensors, and the stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

namespace mtp::cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Kernels read these by their sizes alone.
inline void check(const Tensor& tensor, const char* op, const char* name, ScalarType dtype,
                  std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " has another dtype than it must have");
  STD_TORCH_CHECK(tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(), op, ": ", name,
                  " is not contiguous or has another number of dimensions");
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t size = tensor.size(static_cast<int64_t>(i));
    STD_TORCH_CHECK(size == sizes.begin()[i], op, ": dimension ", i, " of ", name, " is ", size, ", not ",
                    sizes.begin()[i]);
  }
}

// bf16 rows that can be read 16 bytes at a time.
inline const void* matrix(const Tensor& tensor, const char* op, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::BFloat16 && tensor.dim() == 2 && tensor.size(0) == rows &&
                      tensor.size(1) == columns && tensor.stride(1) == 1 && tensor.stride(0) % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0,
                  op, ": ", name, " is not a bf16 matrix of [", rows, ", ", columns, "] in rows of 16 bytes");
  return tensor.const_data_ptr();
}

// Whether indices are int64; else they are int32.
inline bool is_int64(const Tensor& tensor, const char* op, const char* name) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int, op, ": ", name, " is neither int32 nor int64");
  return dtype == ScalarType::Long;
}

// The stride of an fp32 scale, of which there is one, or one a KV head.
inline int64_t scale_stride(const Tensor& scale, const char* op, const char* name, int64_t num_kv_heads) {
  const int64_t scales = scale.numel();
  STD_TORCH_CHECK(scales == 1 || scales == num_kv_heads, op, ": ", name, " is neither one number nor one a KV head");
  check(scale, op, name, ScalarType::Float, {scales});
  return scales == 1 ? 0 : 1;
}

inline int log2_of(int64_t n, const char* op, const char* name) {
  int log2 = 0;
  while ((int64_t{1} << log2) < n) {
    ++log2;
  }
  STD_TORCH_CHECK(n == int64_t{1} << log2, op, ": ", name, " is ", n, ", not a power of two");
  return log2;
}

inline void* current_stream(int device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

}  // namespace mtp::cuda
