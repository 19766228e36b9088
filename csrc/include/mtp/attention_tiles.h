// The inner loops of draft_attention: tiles of queries and keys in registers. A key or value is widened once a tile.
#pragma once

#include "mtp/attention.h"
#include "mtp/packed.h"

namespace mtp::MTP_ISA::attention {

constexpr int64_t kStep = kPair;
constexpr int kTileQueries = kAttentionTile;

// Whether queries, keys, weights and values are multiplied as pairs of bf16.
template <class T>
constexpr bool kPairs = kHasPairDot && __is_same(T, BFloat16);

// Keys of a tile of queries, and steps of values: as many accumulators as half of the registers hold, beside the keys
// of a step or the values of a key, which take two registers each where they are widened.
template <class T, int kQueries>
constexpr int kTileKeys = (kPairs<T> && kQueries <= 2) ? 8 : (kLanes == 16 ? 4 : 2);
template <int kQueries>
constexpr int kTileSteps = (kQueries <= 2 ? 4 : 2) / (kLanes == 16 ? 1 : 2);

template <int n>
struct Constant {
  static constexpr int value = n;
};

// Into the second cache: a core has more such reads on the way than reads into the first one, and from memory that made
// 1.2 ms of 2.4 (8192 keys of 2 heads, head_dim 512, bf16, one core).
// Always inlined: g++ takes a function that only prefetches for one without effect, and leaves calls of it out.
template <class T>
inline __attribute__((always_inline)) void prefetch_step(const T* at) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kStep; i += kLine) {
    __builtin_prefetch(at + i, 0, 2);
  }
}

// A block of rows of a cache: `count` rows from the first of some KV heads on, and the last again behind them.
template <class T>
struct Block {
  const T* row[kAttentionBlock];
  int64_t count;
};

// One of these heads, `offset` elements behind the first.
template <class T>
struct HeadRows {
  const Block<T>& block;
  int64_t offset;

  int64_t count() const { return block.count; }
  const T* operator[](int64_t i) const { return block.row[i] + offset; }
};

// A step of a row as it is multiplied: pairs of bf16 as they lie, or widened.
template <class T>
inline auto load_step(const T* at) {
  if constexpr (kPairs<T>) {
    return load_words(at);
  } else {
    return load_pair(at);
  }
}

// scores[i][j] = queries[i] . keys[first + j], for a whole tile of queries: a step of one, the same step of the next,
// and so on.
template <class T, int kQueries, bool kPrefetch>
inline void score_tile(const HeadRows<T>& keys, const HeadRows<T>& next, int64_t first, const float* queries,
                       int64_t width, float* scores, int64_t score_stride) {
  constexpr int kKeys = kTileKeys<T, kQueries>;
  Floats totals[kQueries][kKeys] = {};
  for (int64_t d = 0; d < width; d += kStep) {
#pragma GCC unroll 8
    for (int j = 0; kPrefetch && j < kKeys; ++j) {
      prefetch_step(next[first + j] + d);
    }
    decltype(load_step<T>(nullptr)) key[kKeys];
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) {
      key[j] = load_step(keys[first + j] + d);
    }
    if constexpr (kPairs<T>) {
#pragma GCC unroll 8
      for (int i = 0; i < kQueries; ++i) {
        const Words query = (Words)load(queries + d / kStep * kQueries * kLanes + i * kLanes);
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) {
          totals[i][j] = pair_dot(totals[i][j], query, key[j]);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kQueries; ++i) {
        const Pair query = load_pair(queries + d * kQueries + i * kStep);
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) {
          totals[i][j] += key[j].first * query.first;
        }
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) {
          totals[i][j] += key[j].second * query.second;
        }
      }
    }
  }
#if MTP_LANES == 16
  if constexpr (kQueries * kKeys == 16 || kQueries * kKeys == 8) {
    float tile[kQueries * kKeys];
    sums<kQueries * kKeys>(totals[0], tile);
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i) {
      __builtin_memcpy(scores + i * score_stride, tile + i * kKeys, kKeys * sizeof(float));
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; j += 4) {
      constexpr int kLast = kKeys < 4 ? kKeys - 1 : 3;
      const Quad tile = sums(totals[i][j], totals[i][j + 1], totals[i][j + (kLast == 3 ? 2 : 0)], totals[i][j + kLast]);
      __builtin_memcpy(scores + i * score_stride + j, &tile, (kLast + 1) * sizeof(float));
    }
  }
}

template <int kQueries, bool kPrefetch, class T>
void score_block(const HeadRows<T>& keys, const HeadRows<T>& next, const float* queries, int64_t width, float* scores,
                 int64_t score_stride) {
  for (int64_t j = 0; j < keys.count(); j += kTileKeys<T, kQueries>) {
    score_tile<T, kQueries, kPrefetch>(keys, next, j, queries, width, scores + j, score_stride);
  }
}

// total[i] += weights[i][j] * values[j] for `steps` of the values, over a block.
template <class T, int kQueries, int kSteps, bool kPrefetch>
inline __attribute__((always_inline)) void add_values(const HeadRows<T>& values, const HeadRows<T>& next, int64_t d,
                                                      const float* weights, int64_t weight_stride,
                                                      Pair (&total)[kQueries][kSteps]) {
  for (int64_t j = 0; j < values.count(); ++j) {
    Pair value[kSteps];
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      value[s] = load_pair(values[j] + d + s * kStep);
      if (kPrefetch) {
        prefetch_step(next[j] + d + s * kStep);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i) {
      const Floats weight = broadcast(weights[i * weight_stride + j]);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        total[i][s].first += weight * value[s].first;
        total[i][s].second += weight * value[s].second;
      }
    }
  }
}

// The same with weights rounded to bf16, two to a float, and two values at a time.
template <class T, int kQueries, int kSteps, bool kPrefetch>
inline __attribute__((always_inline)) void add_value_pairs(const HeadRows<T>& values, const HeadRows<T>& next,
                                                           int64_t d, const float* weights, int64_t weight_stride,
                                                           Pair (&total)[kQueries][kSteps]) {
  for (int64_t j = 0; j < values.count(); j += 2) {
    const bool last = j + 1 == values.count();  // alone: what lies behind it may be NaN
    Words evens[kSteps], odds[kSteps];
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      const Words one = load_words(values[j] + d + s * kStep);
      const Words two = last ? Words{} : load_words(values[j + 1] + d + s * kStep);
      evens[s] = (one & 0xffffu) | two << 16;
      odds[s] = one >> 16 | (two & 0xffff0000u);
      if (kPrefetch) {
        prefetch_step(next[j] + d + s * kStep);
        prefetch_step(next[j + 1] + d + s * kStep);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i) {
      const Words weight = broadcast_word(as_word(weights[i * weight_stride + j / 2]));
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        total[i][s].first = pair_dot(total[i][s].first, weight, evens[s]);
        total[i][s].second = pair_dot(total[i][s].second, weight, odds[s]);
      }
    }
  }
}

// sums[i] += weights[i][j] * values[j], over the block; `fresh` starts from zero.
template <class T, int kQueries, int kSteps, bool kPrefetch>
inline void add_tile(const HeadRows<T>& values, const HeadRows<T>& next, int64_t d, const float* weights,
                     int64_t weight_stride, bool fresh, float* sums, int64_t width) {
  Pair total[kQueries][kSteps];
#pragma GCC unroll 8
  for (int i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      total[i][s] = fresh ? Pair{} : load_pair(sums + i * width + d + s * kStep);
    }
  }
  if constexpr (kPairs<T>) {
    add_value_pairs<T, kQueries, kSteps, kPrefetch>(values, next, d, weights, weight_stride, total);
  } else {
    add_values<T, kQueries, kSteps, kPrefetch>(values, next, d, weights, weight_stride, total);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      __builtin_memcpy(sums + i * width + d + s * kStep, &total[i][s], sizeof(Pair));
    }
  }
}

template <int kQueries, bool kPrefetch, class T>
void add_block(const HeadRows<T>& values, const HeadRows<T>& next, const float* weights, int64_t weight_stride,
               bool fresh, float* sums, int64_t width) {
  constexpr int kSteps = kTileSteps<kQueries>;
  int64_t d = 0;
  for (; d + kSteps * kStep <= width; d += kSteps * kStep) {
    add_tile<T, kQueries, kSteps, kPrefetch>(values, next, d, weights, weight_stride, fresh, sums, width);
  }
  for (; d < width; d += kStep) {
    add_tile<T, kQueries, 1, kPrefetch>(values, next, d, weights, weight_stride, fresh, sums, width);
  }
}

// Calls body with the number of queries of each tile as a constant: whole tiles, then what is left.
template <class Body>
inline void for_tiles(int64_t queries, const Body& body) {
  int64_t i = 0;
  for (; i + kTileQueries <= queries; i += kTileQueries) {
    body(i, Constant<kTileQueries>{});
  }
  switch (queries - i) {
    case 3:
      return body(i, Constant<3>{});
    case 2:
      return body(i, Constant<2>{});
    case 1:
      return body(i, Constant<1>{});
    default:
      return;
  }
}

}  // namespace mtp::MTP_ISA::attention
