// Views over strided memory, without torch: a pointer and strides in elements, indexed with 64-bit offsets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mtp {

template <class T, int kRank>
struct View {
  T* data = nullptr;
  int64_t stride[kRank] = {};

  template <class... Index>
  T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == kRank);
    int dim = 0;
    int64_t offset = 0;
    ((offset += static_cast<int64_t>(index) * stride[dim++]), ...);
    return data[offset];
  }
};

// int32 or int64, read as int64.
template <int kRank>
struct IndexView {
  const void* data = nullptr;
  int64_t stride[kRank] = {};
  bool is_int64 = true;

  template <class... Index>
  int64_t operator()(Index... index) const {
    static_assert(sizeof...(Index) == kRank);
    int dim = 0;
    int64_t offset = 0;
    ((offset += static_cast<int64_t>(index) * stride[dim++]), ...);
    return is_int64 ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
};

inline bool in_range(int64_t value, int64_t size) { return value >= 0 && value < size; }

// a + b that wraps around as torch's integers do, where C++ leaves it undefined: a caller's index may hold anything.
inline int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

}  // namespace mtp
