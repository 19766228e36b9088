// The inner loops of draft_attention: tiles of queries and keys in registers. A key or value is widened once a tile.
#pragma once

#include "mtp/attention.h"
#include "mtp/packed.h"

namespace mtp::MTP_ISA::attention {

constexpr int64_t kStep = kPair;
constexpr int kTileQueries = kAttentionTile;
constexpr int kTileKeys = kLanes == 16 ? 4 : 2;   // as many accumulators as the registers hold
constexpr int kTileSteps = kLanes == 16 ? 2 : 1;  // the same, of values

template <int n>
struct Constant {
  static constexpr int value = n;
};

// Into the second cache: a core has more such reads on the way than reads into the first one, and from memory that made
// 1.2 ms of 2.4 (8192 keys of 2 heads, head_dim 512, bf16, one core).
template <class T>
inline void prefetch_step(const T* at) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kStep; i += kLine) {
    __builtin_prefetch(at + i, 0, 2);
  }
}

// A block of rows of a cache, one KV head: `count` rows, and the last again behind them.
template <class T>
struct Block {
  const T* row[kAttentionBlock];
  int64_t count;

  // The rows that lie `offset` elements behind these.
  Block behind(int64_t offset) const {
    Block moved = *this;
    for (const T*& at : moved.row) {
      at += offset;
    }
    return moved;
  }
};

// scores[i][j] = queries[i] . keys[j], for a whole tile of queries: a step of one, the same step of the next, and so
// on.
template <class T, int kQueries, bool kPrefetch>
inline void score_tile(const T* const* keys, const T* const* next, const float* queries, int64_t width, float* scores,
                       int64_t score_stride) {
  Floats totals[kQueries][kTileKeys] = {};
  for (int64_t d = 0; d < width; d += kStep) {
    Pair key[kTileKeys];
    for (int j = 0; j < kTileKeys; ++j) {
      key[j] = load_pair(keys[j] + d);
      if (kPrefetch) {
        prefetch_step(next[j] + d);
      }
    }
    for (int i = 0; i < kQueries; ++i) {
      const Pair query = load_pair(queries + d * kQueries + i * kStep);
      for (int j = 0; j < kTileKeys; ++j) {
        totals[i][j] += key[j].first * query.first;
      }
      for (int j = 0; j < kTileKeys; ++j) {
        totals[i][j] += key[j].second * query.second;
      }
    }
  }
#if MTP_LANES == 16
  if constexpr (kQueries == 4 || kQueries == 2) {
    float tile[kQueries * kTileKeys];
    sums<kQueries * kTileKeys>(totals[0], tile);
    for (int i = 0; i < kQueries; ++i) {
      __builtin_memcpy(scores + i * score_stride, tile + i * kTileKeys, kTileKeys * sizeof(float));
    }
    return;
  }
#endif
  for (int i = 0; i < kQueries; ++i) {
    constexpr int kLast = kTileKeys - 1;
    const Quad tile = sums(totals[i][0], totals[i][1], totals[i][kLast == 3 ? 2 : 0], totals[i][kLast]);
    __builtin_memcpy(scores + i * score_stride, &tile, kTileKeys * sizeof(float));
  }
}

template <int kQueries, bool kPrefetch, class T>
void score_block(const Block<T>& keys, const Block<T>& next, const float* queries, int64_t width, float* scores,
                 int64_t score_stride) {
  for (int64_t j = 0; j < keys.count; j += kTileKeys) {
    score_tile<T, kQueries, kPrefetch>(keys.row + j, next.row + j, queries, width, scores + j, score_stride);
  }
}

// sums[i] += weights[i][j] * values[j], over the block; `fresh` starts from zero.
template <class T, int kQueries, int kSteps, bool kPrefetch>
inline void add_tile(const Block<T>& values, const Block<T>& next, int64_t d, const float* weights,
                     int64_t weight_stride, bool fresh, float* sums, int64_t width) {
  Pair total[kQueries][kSteps] = {};
  if (!fresh) {
    for (int i = 0; i < kQueries; ++i) {
      for (int s = 0; s < kSteps; ++s) {
        total[i][s] = load_pair(sums + i * width + d + s * kStep);
      }
    }
  }
  for (int64_t j = 0; j < values.count; ++j) {
    Pair value[kSteps];
    for (int s = 0; s < kSteps; ++s) {
      value[s] = load_pair(values.row[j] + d + s * kStep);
      if (kPrefetch) {
        prefetch_step(next.row[j] + d + s * kStep);
      }
    }
    for (int i = 0; i < kQueries; ++i) {
      const Floats weight = broadcast(weights[i * weight_stride + j]);
      for (int s = 0; s < kSteps; ++s) {
        total[i][s].first += weight * value[s].first;
        total[i][s].second += weight * value[s].second;
      }
    }
  }
  for (int i = 0; i < kQueries; ++i) {
    for (int s = 0; s < kSteps; ++s) {
      __builtin_memcpy(sums + i * width + d + s * kStep, &total[i][s], sizeof(Pair));
    }
  }
}

template <int kQueries, bool kPrefetch, class T>
void add_block(const Block<T>& values, const Block<T>& next, const float* weights, int64_t weight_stride, bool fresh,
               float* sums, int64_t width) {
  int64_t d = 0;
  for (; d + kTileSteps * kStep <= width; d += kTileSteps * kStep) {
    add_tile<T, kQueries, kTileSteps, kPrefetch>(values, next, d, weights, weight_stride, fresh, sums, width);
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
