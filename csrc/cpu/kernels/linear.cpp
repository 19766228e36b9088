// y = x @ weight.T for a few rows of x: each weight is read from memory once for all of them.
#include "mtp/linear.h"

#include "mtp/packed.h"
#include "mtp/vector_math.h"

namespace mtp::MTP_ISA {
namespace {

// Weight rows that all rows of x go over while they are in the cache: so many, or fewer of long ones.
constexpr int kTile = 32;
constexpr int64_t kTileBytes = 131072;
// Rows of x whose products share the registers: many of short ones, which stay in the first cache together, else a few.
constexpr int kManyX = kLanes == 16 ? 8 : 4;
constexpr int kFewX = 4;
constexpr int64_t kManyBytes = 16384;
// Weight rows with kX rows of x: as many sums as half of the registers hold.
template <int kX>
constexpr int kWeights = (kX == 1       ? 8
                          : kX <= kFewX ? 4
                                        : 2) /
                         (kLanes == 16 ? 1 : 2);
// Weight rows that are fetched ahead, by one row of x and by more. Projections of an E2B step, bf16, batch 1, 2 cores:
// 950 us without, 580 with 8 rows, 470 with 16, 550 with 32.
constexpr int kAheadAlone = kLanes;
constexpr int kAhead = kLanes / 2;

// The rows of x that go over a tile together, one of the passes over it.
struct Pass {
  int64_t row;
  int rows;
  int number, passes;
};

// The weights that are asked for in time: `ahead` elements behind those that are multiplied, in one of `every` steps.
struct Fetch {
  int64_t ahead;
  int first, every;
};

constexpr Fetch kNothing = {0, -1, 1};

template <int kW, class T>
inline __attribute__((always_inline)) void fetch_rows(const T* weight, int64_t weight_stride, const Fetch& fetch,
                                                      int& wait) {
  if (wait == 0) {
#pragma GCC unroll 8
    for (int j = 0; j < kW; ++j) {
      for (int64_t i = 0; i < kPair; i += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(weight + j * weight_stride + i + fetch.ahead, 0, 2);  // of no address, it does nothing
      }
    }
    wait = fetch.every;
  }
  --wait;
}

// Adds the products of kX rows of x and kW weight rows over `pairs` pairs of vectors. The loops over rows are unrolled
// by order, early enough that the sums live in registers from the first product to the last.
template <class T, int kX, int kW>
inline __attribute__((always_inline)) void accumulate(Floats (&sum_of)[kX][kW], const float* x, int64_t x_stride,
                                                      const T* weight, int64_t weight_stride, int64_t pairs,
                                                      const Fetch& fetch) {
  int wait = fetch.first;
  if constexpr (kHasPairDot && __is_same(T, BFloat16)) {
    for (; pairs > 0; --pairs, x += kPackedPair<T>, weight += kPair) {
      fetch_rows<kW>(weight, weight_stride, fetch, wait);
      Words w[kW];
#pragma GCC unroll 8
      for (int j = 0; j < kW; ++j) {
        __builtin_memcpy(&w[j], weight + j * weight_stride, sizeof w[j]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        const Words row = (Words)load(x + i * x_stride);
#pragma GCC unroll 8
        for (int j = 0; j < kW; ++j) {
          sum_of[i][j] = pair_dot(sum_of[i][j], row, w[j]);
        }
      }
    }
    return;
  }
  for (; pairs > 0; --pairs, x += kPackedPair<T>, weight += kPair) {
    fetch_rows<kW>(weight, weight_stride, fetch, wait);
    Pair w[kW];
#pragma GCC unroll 8
    for (int j = 0; j < kW; ++j) {
      w[j] = load_pair(weight + j * weight_stride);
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
template <class T, int kX, int kW>
inline void products(const LinearParams& p, const float* x, const T* weight, const Fetch& fetch, float (*tile)[kTile],
                     int column) {
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
  for (int64_t segment = 0; segment < p.segments; ++segment) {
    const float* from = x + segment * p.segment_stride;
    const T* row = weight + segment * p.columns;
    accumulate<T>(sum_of, from, p.packed_stride, row, p.weight_stride, whole, fetch);
    if (left > 0) {
      T last[kW][kPair];  // the ends of the rows, and zeros
      __builtin_memset(last, 0, sizeof last);
#pragma GCC unroll 8
      for (int j = 0; j < kW; ++j) {
        __builtin_memcpy(last[j], row + j * p.weight_stride + whole * kPair,
                         static_cast<unsigned long>(left) * sizeof(T));
      }
      accumulate<T>(sum_of, from + whole * kPackedPair<T>, p.packed_stride, last[0], kPair, 1, kNothing);
    }
  }
#if MTP_LANES == 16
  if constexpr (kX * kW == 16 || kX * kW == 8) {
    float all[kX * kW];
    sums<kX * kW>(sum_of[0], all);
    for (int i = 0; i < kX; ++i) {
      __builtin_memcpy(tile[i] + column, all + i * kW, kW * sizeof(float));
    }
    return;
  }
#endif
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
template <class T, int kX>
void fill_tile(const LinearParams& p, const Pass& pass, int64_t first, int count, float (*tile)[kTile]) {
  constexpr int kW = kWeights<kX>;
  const float* x = p.packed + pass.row * p.packed_stride;
  const T* weight = static_cast<const T*>(p.weight) + first * p.weight_stride;
  // One pass fetches the rows that come soon. Of several passes, each fetches its share of the next tile.
  const int64_t rows_ahead = pass.passes > 1 ? count : kX == 1 ? kAheadAlone : kAhead;
  const Fetch fetch{rows_ahead * p.weight_stride, pass.number, pass.passes};
  int j = 0;
  for (; j + kW <= count; j += kW) {
    products<T, kX, kW>(p, x, weight + j * p.weight_stride, fetch, tile, j);
  }
  for (; j < count; ++j) {
    products<T, kX, 1>(p, x, weight + j * p.weight_stride, kNothing, tile, j);
  }
}

template <class T>
void fill(const LinearParams& p, const Pass& pass, int64_t first, int count, float (*tile)[kTile]) {
  switch (pass.rows) {
    case 1:
      return fill_tile<T, 1>(p, pass, first, count, tile);
    case 2:
      return fill_tile<T, 2>(p, pass, first, count, tile);
    case 3:
      return fill_tile<T, 3>(p, pass, first, count, tile);
    case kManyX:
      return fill_tile<T, kManyX>(p, pass, first, count, tile);
    default:
      return fill_tile<T, kFewX>(p, pass, first, count, tile);
  }
}

// Calls body(pass, first, count) for tiles that cover all rows of x and the weight rows [begin, end).
template <class T, class Body>
inline void for_tiles(const LinearParams& p, int64_t begin, int64_t end, const Body& body) {
  const int64_t length = p.segments * p.columns;
  const int64_t bytes = length / kPair * kPackedPair<T> * static_cast<int64_t>(sizeof(float));  // of a row of x
  const int64_t many = kManyX * bytes <= kManyBytes ? kManyX : kFewX;
  const int64_t whole = p.rows / many, rest = p.rows - whole * many;
  const int passes = static_cast<int>(whole + rest / kFewX + (rest % kFewX > 0));
  const int64_t fit = kTileBytes / (length * static_cast<int64_t>(sizeof(T))) / 8 * 8;
  const int64_t size = fit < 8 ? 8 : fit < kTile ? fit : kTile;
  for (int64_t first = begin; first < end; first += size) {
    const int count = static_cast<int>(end - first < size ? end - first : size);
    Pass pass{0, 0, 0, passes};
    for (; pass.row < p.rows; pass.row += pass.rows, ++pass.number) {
      const int64_t left = p.rows - pass.row;
      pass.rows = static_cast<int>(left >= many ? many : left < kFewX ? left : kFewX);
      body(pass, first, count);
    }
  }
}

template <class Y>
inline void store_row(Y* y, const float* values, int count) {
  for (int j = 0; j < count; j += kLanes) {
    store_up_to(y + j, load(values + j), count - j);  // a tile's row is whole vectors long
  }
}

template <class T, class Y>
void linear(const LinearParams& p, int64_t begin, int64_t end) {
  for_tiles<T>(p, begin, end, [&p](const Pass& pass, int64_t first, int count) {
    float tile[kManyX][kTile] = {};
    fill<T>(p, pass, first, count, tile);
    for (int i = 0; i < pass.rows; ++i) {
      store_row(static_cast<Y*>(p.y) + (pass.row + i) * p.out + first, tile[i], count);
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
  for_tiles<T>(p, begin, end, [&p](const Pass& pass, int64_t first, int count) {
    float gate[kManyX][kTile] = {};
    float up[kManyX][kTile] = {};
    fill<T>(p, pass, first, count, gate);
    fill<T>(p, pass, p.out + first, count, up);
    for (int i = 0; i < pass.rows; ++i) {
      for (int j = 0; j < kTile; j += kLanes) {
        const Floats value = gelu_tanh(load(gate[i] + j)) * load(up[i] + j);
        __builtin_memcpy(gate[i] + j, &value, sizeof value);
      }
      store_row(static_cast<T*>(p.y) + (pass.row + i) * p.out + first, gate[i], count);
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
