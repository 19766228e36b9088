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

inline void* current_stream(int device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

}  // namespace mtp::cuda
