// y = x @ weight.T for a few rows of x: each weight is read from memory once for all of them.
#include "mtp/linear.h"

#include "mtp/packed.h"
#include "mtp/vector_math.h"

namespace mtp::MTP_ISA {
namespace {

constexpr int kTile = 32;  // weight rows that all rows of x go over while they are in the cache
// Blocks of weight rows that are fetched ahead. Projections of an E2B step, bf16, 2 cores: 950 us without, 580 with 1,
// 470 with 2, 550 with 4.
constexpr int kAhead = 2;
constexpr int kManyX = 4;                     // rows of x whose products share the registers
constexpr int kManyW = kLanes == 16 ? 4 : 2;  // with so many weight rows,
constexpr int kManyAlone = 2 * kManyW;        // or with so many when there is one row of x

// Adds the products of kX rows of x and kW weight rows over `pairs` pairs of vectors. The loops over rows are unrolled
// by order, early enough that the sums live in registers from the first product to the last.
template <class T, bool kExact, int kX, int kW>
inline __attribute__((always_inline)) void accumulate(Floats (&sum_of)[kX][kW], const float* x, int64_t x_stride,
                                                      const T* weight, int64_t weight_stride, int64_t pairs,
                                                      int64_t ahead) {
  if constexpr (kHasPairDot && __is_same(T, BFloat16)) {
    for (; pairs > 0; --pairs, x += kPair, weight += kPair) {
      Words w[kW];
#pragma GCC unroll 8
      for (int j = 0; j < kW; ++j) {
        __builtin_memcpy(&w[j], weight + j * weight_stride, sizeof w[j]);
        __builtin_prefetch(weight + j * weight_stride + ahead, 0, 2);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        const Words high = (Words)load(x + i * x_stride);
#pragma GCC unroll 8
        for (int j = 0; j < kW; ++j) {
          sum_of[i][j] = pair_dot(sum_of[i][j], high, w[j]);
        }
        if constexpr (!kExact) {
          const Words low = (Words)load(x + i * x_stride + kLanes);
#pragma GCC unroll 8
          for (int j = 0; j < kW; ++j) {
            sum_of[i][j] = pair_dot(sum_of[i][j], low, w[j]);
          }
        }
      }
    }
    return;
  }
  for (; pairs > 0; --pairs, x += kPair, weight += kPair) {
    Pair w[kW];
#pragma GCC unroll 8
    for (int j = 0; j < kW; ++j) {
      w[j] = load_pair(weight + j * weight_stride);
      __builtin_prefetch(weight + j * weight_stride + ahead, 0, 2);  // of an address past the end does nothing
    }
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) {
      const Floats first = load(x + i * x_stride);
      const Floats second = load(x + i * x_stride + kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < kW; ++j) {
        sum_of[i][j] += first * w[j].first;
        sum_of[i][j] += second * w[j].second;
      }
    }
  }
}

// tile[i][column + j] = x[i] . weight[j] for kX rows of x and kW weight rows. Each has one accumulator and takes the
// row from its first element to the last, so its bits depend neither on kX nor on kW.
template <class T, bool kExact, int kX, int kW>
inline void products(const LinearParams& p, const float* x, const T* weight, float (*tile)[kTile], int column) {
  Floats sum_of[kX][kW];
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kW; ++j) {
      sum_of[i][j] = Floats{};
    }
  }
  const int64_t whole = p.columns / kPair;
  const int64_t left = p.columns - whole * kPair;
  const int64_t ahead = kAhead * kW * p.weight_stride;
  for (int64_t segment = 0; segment < p.segments; ++segment) {
    const float* from = x + segment * p.segment_stride;
    const T* row = weight + segment * p.columns;
    accumulate<T, kExact>(sum_of, from, p.packed_stride, row, p.weight_stride, whole, ahead);
    if (left > 0) {
      T last[kW][kPair];  // the ends of the rows, and zeros
      __builtin_memset(last, 0, sizeof last);
#pragma GCC unroll 8
      for (int j = 0; j < kW; ++j) {
        __builtin_memcpy(last[j], row + j * p.weight_stride + whole * kPair,
                         static_cast<unsigned long>(left) * sizeof(T));
      }
      accumulate<T, kExact>(sum_of, from + whole * kPair, p.packed_stride, last[0], kPair, 1, 0);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) {
    float* to = tile[i] + column;
    if constexpr (kW % 4 == 0) {
#pragma GCC unroll 8
      for (int j = 0; j < kW; j += 4) {
        const Quad four = sums(sum_of[i][j], sum_of[i][j + 1], sum_of[i][j + 2], sum_of[i][j + 3]);
        __builtin_memcpy(to + j, &four, sizeof four);
      }
    } else if constexpr (kW == 2) {
      const Quad two = sums(sum_of[i][0], sum_of[i][1]);
      __builtin_memcpy(to, &two, sizeof two / 2);
    } else {
      to[0] = sum(sum_of[i][0]);
    }
  }
}

// tile[i][j] = x[i] . weight[first + j] for j below count <= kTile.
template <class T, bool kExact, int kX>
void fill(const LinearParams& p, const float* x, int64_t first, int count, float (*tile)[kTile]) {
  constexpr int kW = kX == 1 ? kManyAlone : kManyW;
  const T* weight = static_cast<const T*>(p.weight) + first * p.weight_stride;
  int j = 0;
  for (; j + kW <= count; j += kW) {
    products<T, kExact, kX, kW>(p, x, weight + j * p.weight_stride, tile, j);
  }
  for (; j < count; ++j) {
    products<T, kExact, kX, 1>(p, x, weight + j * p.weight_stride, tile, j);
  }
}

template <class T, bool kExact>
void fill_rows(const LinearParams& p, int64_t row, int rows, int64_t first, int count, float (*tile)[kTile]) {
  const float* x = p.packed + row * p.packed_stride;
  switch (rows) {
    case 1:
      return fill<T, kExact, 1>(p, x, first, count, tile);
    case 2:
      return fill<T, kExact, 2>(p, x, first, count, tile);
    case 3:
      return fill<T, kExact, 3>(p, x, first, count, tile);
    default:
      return fill<T, kExact, kManyX>(p, x, first, count, tile);
  }
}

template <class T>
void fill(const LinearParams& p, int64_t row, int rows, int64_t first, int count, float (*tile)[kTile]) {
  if (kHasPairDot && p.exact) {
    return fill_rows<T, true>(p, row, rows, first, count, tile);
  }
  fill_rows<T, false>(p, row, rows, first, count, tile);
}

// Calls body(row, rows, first, count) for tiles that cover all rows of x and the weight rows [begin, end).
template <class Body>
inline void for_tiles(const LinearParams& p, int64_t begin, int64_t end, const Body& body) {
  for (int64_t first = begin; first < end; first += kTile) {
    const int count = static_cast<int>(end - first < kTile ? end - first : kTile);
    for (int64_t row = 0; row < p.rows; row += kManyX) {
      body(row, static_cast<int>(p.rows - row < kManyX ? p.rows - row : kManyX), first, count);
    }
  }
}

template <class Y>
inline void store_row(Y* y, const float* values, int count) {
  for (int j = 0; j < count; j += kLanes) {
    const Floats some = load(values + j);  // a tile's row is whole vectors long
    if (count - j >= kLanes) {
      store(y + j, some);
    } else {
      store_some(y + j, some, count - j);
    }
  }
}

template <class T, class Y>
void linear(const LinearParams& p, int64_t begin, int64_t end) {
  for_tiles(p, begin, end, [&p](int64_t row, int rows, int64_t first, int count) {
    float tile[kManyX][kTile] = {};
    fill<T>(p, row, rows, first, count, tile);
    for (int i = 0; i < rows; ++i) {
      store_row(static_cast<Y*>(p.y) + (row + i) * p.out + first, tile[i], count);
    }
  });
}

// g / 2 * (1 + tanh(z)) = g / (1 + e^(-2 z)), z = sqrt(2 / pi) * (g + 0.044715 g^3): no cancellation, and the right
// limits where g^3 overflows.
inline Floats gelu_tanh(Floats g) {
  const Floats minus_2z = g * (g * g * (-1.5957691216f * 0.044715f) - 1.5957691216f);
  return g / (vector_math::exp(minus_2z) + 1.0f);
}

template <class T>
void geglu(const LinearParams& p, int64_t begin, int64_t end) {
  for_tiles(p, begin, end, [&p](int64_t row, int rows, int64_t first, int count) {
    float gate[kManyX][kTile] = {};
    float up[kManyX][kTile] = {};
    fill<T>(p, row, rows, first, count, gate);
    fill<T>(p, row, rows, p.out + first, count, up);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < kTile; j += kLanes) {
        const Floats value = gelu_tanh(load(gate[i] + j)) * load(up[i] + j);
        __builtin_memcpy(gate[i] + j, &value, sizeof value);
      }
      store_row(static_cast<T*>(p.y) + (row + i) * p.out + first, gate[i], count);
    }
  });
}

}  // namespace

extern const LinearKernels linear_kernels = {
    {linear<float, float>, linear<BFloat16, BFloat16>, linear<Half, Half>},
    {linear<float, float>, linear<BFloat16, float>, linear<Half, float>},
    {geglu<float>, geglu<BFloat16>, geglu<Half>},
};

}  // namespace mtp::MTP_ISA
