// The one order in which every op ranks: higher value first, NaN as -inf, the lower index wins a tie.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace mtp {

// NaN ranks as -inf.
inline float rank_value(float value) { return std::isnan(value) ? -std::numeric_limits<float>::infinity() : value; }

// Leaves the indices of the k best of values[0..n) in order[0..k), best first. A total order, so never a matter of
// luck.
inline void rank_best(const float* values, int64_t n, int64_t k, std::vector<int64_t>& order) {
  order.resize(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [values](int64_t a, int64_t b) {
    const float x = rank_value(values[a]);
    const float y = rank_value(values[b]);
    return x > y || (x == y && a < b);
  });
}

}  // namespace mtp
