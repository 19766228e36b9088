// What the launchers of the heads share: rows in fp32, kernels by dtype, ranks as integers, fresh results.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"
#include "launch.h"
#include "mtp/heads.h"

MTP_KERNELS(HeadKernels, heads)

namespace mtp::cpu {

// The place of a dtype in the arrays of HeadKernels.
inline int head_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return 0;
    case ScalarType::BFloat16:
      return 1;
    case ScalarType::Half:
      return 2;
    default:
      STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float8_e4m3fn, "expected a float dtype");
      return 3;
  }
}

inline int element_size(int type) { return type == 0 ? 4 : type == 3 ? 1 : 2; }

// The leading dimensions of a tensor [..., columns], flat: row r starts at offset(r), in elements.
struct LeadingRows {
  std::vector<int64_t> sizes, strides;
  int64_t count = 1;
  int64_t columns;
  int type;
  const char* data;

  explicit LeadingRows(const Tensor& tensor)
      : columns(tensor.size(tensor.dim() - 1)),
        type(head_type(tensor)),
        data(static_cast<const char*>(tensor.const_data_ptr())) {
    for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
      sizes.push_back(tensor.size(d));
      strides.push_back(tensor.stride(d));
      count *= sizes.back();
    }
  }

  const void* row(int64_t r) const {
    int64_t offset = 0;
    for (size_t d = sizes.size(); d-- > 0; r /= sizes[d]) {
      offset += r % sizes[d] * strides[d];
    }
    return data + offset * element_size(type);
  }

  int64_t padded() const { return (columns + kHeadPad - 1) / kHeadPad * kHeadPad; }

  // Rows [begin, end) in fp32, padded() apart, for products with a weight of this element type.
  void widen(int64_t begin, int64_t end, int weight_type, float* out) const {
    for (int64_t r = begin; r < end; ++r) {
      heads().widen[type](row(r), columns, 4 / element_size(weight_type), out + (r - begin) * padded());
    }
  }
};

// A contiguous tensor [leading..., last], last left out if it is negative.
inline Tensor empty_rows(const LeadingRows& rows, int64_t last, int32_t dtype) {
  std::vector<int64_t> sizes = rows.sizes;
  if (last >= 0) {
    sizes.push_back(last);
  }
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// The token ids of an optional tensor [n].
inline std::vector<int64_t> suppressed(const std::optional<Tensor>& suppress_ids) {
  std::vector<int64_t> ids;
  if (suppress_ids) {
    const IndexView<1> view = index_view<1>(*suppress_ids);
    for (int64_t i = 0; i < suppress_ids->size(0); ++i) {
      ids.push_back(view(i));
    }
  }
  return ids;
}

// Ascending with falling values, NaN as -inf, either zero the same; then by id, of 32 bits.
inline uint64_t rank_key(float value, int64_t id) {
  value = std::isnan(value) ? -std::numeric_limits<float>::infinity() : value + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t falling = bits >> 31 ? bits : ~bits & 0x7fffffffu;
  return static_cast<uint64_t>(falling) << 32 | static_cast<uint32_t>(id);
}

inline float key_value(uint64_t key) {
  const uint32_t falling = static_cast<uint32_t>(key >> 32);
  const uint32_t bits = falling >> 31 ? falling : ~falling & 0x7fffffffu;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int64_t key_id(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

inline float log_of(LogSum sum) {
  return std::isinf(sum.largest) ? sum.largest : static_cast<float>(sum.largest + std::log(sum.sum));
}

// At most 0; a value of +inf is certain, and -inf stays.
inline float logprob(float value, float total) {
  return std::isinf(value) ? (value > 0 ? 0.0f : value) : std::min(value - total, 0.0f);
}

}  // namespace mtp::cpu
