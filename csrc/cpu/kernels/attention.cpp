// Attention of all queries of a KV head over one split of a request's keys: scores, softmax, weighted sum of values.
//
// Keys are taken in blocks that stay in the first cache while all queries pass over them. In a tile of queries and keys
// each key or value is widened once for all queries of the tile.
#include "mtp/attention.h"
#include "mtp/attention_tiles.h"
#include "mtp/vector_math.h"

namespace mtp {
namespace MTP_ISA {
namespace {

using namespace attention;

template <class T>
Block<T> find_block(const AttentionParams& p, const AttentionRequest& request, int64_t b, int64_t head, int64_t key,
                    int64_t end, const void* cache, const int64_t* stride) {
  Block<T> block;
  block.count = end - key < kAttentionBlock ? end - key : kAttentionBlock;
  int64_t entry = key / p.page_size, slot = key % p.page_size;
  const T* page = nullptr;
  const T* row = nullptr;
  for (int64_t i = 0; i < kAttentionBlock; ++i) {
    if (i < block.count) {
      if (!page || slot == p.page_size) {
        if (page) {
          ++entry;
          slot = 0;
        }
        const int64_t asked = p.block_table(b, request.first_entry + entry);
        const int64_t id = asked < 0 ? 0 : asked >= p.num_pages ? p.num_pages - 1 : asked;
        page = static_cast<const T*>(cache) + id * stride[0] + head * stride[2];
      }
      row = page + slot++ * stride[1];
    }
    block.row[i] = row;
  }
  return block;
}

// The block in fp32 in `staging`, zeros behind head_dim: for types that widen slowly and for rows that end in a step.
template <class T>
Block<float> stage(const Block<T>& block, int64_t head_dim, int64_t width, float* staging) {
  Block<float> staged;
  staged.count = block.count;
  for (int64_t i = 0; i < kAttentionBlock; ++i) {
    if (i < block.count) {
      for (int64_t d = 0; d < width; d += kStep) {
        const Pair pair = load_pair(block.row[i] + d, head_dim - d);
        __builtin_memcpy(staging + i * width + d, &pair, sizeof pair);
      }
      staged.row[i] = staging + i * width;
    } else {
      staged.row[i] = staged.row[i - 1];
    }
  }
  return staged;
}

// scores become exp(score - max); their maximum and sum. What is behind `count` up to a vector's end is overwritten.
void softmax(float* scores, int64_t count, float logits_soft_cap, float* greatest, float* total) {
  for (int64_t j = count; j % kLanes != 0; ++j) {
    scores[j] = -__builtin_inff();
  }
  Floats most = broadcast(-__builtin_inff());
  for (int64_t j = 0; j < count; j += kLanes) {
    Floats values = load(scores + j);
    if (logits_soft_cap > 0.0f) {
      const Ints hidden = values == broadcast(-__builtin_inff());
      values = select(hidden, values, vector_math::tanh(values / logits_soft_cap) * logits_soft_cap);
      __builtin_memcpy(scores + j, &values, sizeof values);
    }
    most = maximum(values, most);
  }
  float top = most[0];
  for (int i = 1; i < kLanes; ++i) {
    top = most[i] > top ? most[i] : top;
  }
  const float base = top == -__builtin_inff() ? 0.0f : top;  // all -inf: sums of 0, not of NaN
  Floats sums = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const Floats weights = vector_math::exp(load(scores + j) - base);
    __builtin_memcpy(scores + j, &weights, sizeof weights);
    sums += weights;
  }
  *greatest = top;
  *total = sum(sums);
}

template <class T, bool kStaged>
void attend_split(const AttentionParams& p, int64_t b, int64_t head, int64_t split, float* scratch) {
  const AttentionRequest& request = p.requests[b];
  const int64_t begin = request.begin + split * request.split_keys;
  const int64_t end = begin + request.split_keys < request.end ? begin + request.split_keys : request.end;
  const int64_t unit = request.first_unit + split * p.num_kv_heads + head;
  const int64_t width = p.width, stride = p.score_stride;
  const float* queries = p.queries_ready + (b * p.num_kv_heads + head) * p.queries * width;
  float* sums = p.partial + unit * p.queries * width;
  float* staging = scratch + p.queries * stride;
  const auto fetch = [&](const void* cache, const int64_t* cache_stride, int64_t key) {
    const Block<T> found = find_block<T>(p, request, b, head, key, end, cache, cache_stride);
    if constexpr (kStaged) {
      return stage(found, p.head_dim, width, staging);
    } else {
      return found;
    }
  };
  auto next = fetch(p.k, p.k_stride, begin);
  using Kept = typename decltype(next)::Element;
  for (int64_t key = begin; key < end; key += kAttentionBlock) {
    const auto keys = next;
    const auto advance = [&] {
      const int64_t after = key + kAttentionBlock;
      next = after < end ? fetch(p.k, p.k_stride, after) : fetch(p.v, p.v_stride, begin);
    };
    if (!kStaged) {
      advance();  // to ask memory for the next block while this one is worked on
    }
    for_tiles(p.queries, [&](int64_t i, auto count) {
      constexpr int kQueries = decltype(count)::value;
      float* scores = scratch + i * stride + (key - begin);
      if (i == 0 && !kStaged) {
        score_block<Kept, kQueries, true>(keys, next, queries, width, scores, stride);
      } else {
        score_block<Kept, kQueries, false>(keys, next, queries + i * width, width, scores, stride);
      }
    });
    if (kStaged) {
      advance();
    }
  }
  for (int64_t i = 0; i < p.queries; ++i) {
    softmax(scratch + i * stride, end - begin, p.logits_soft_cap, &p.partial_max[unit * p.queries + i],
            &p.partial_sum[unit * p.queries + i]);
  }
  for (int64_t key = begin; key < end; key += kAttentionBlock) {
    const auto values = next;
    const int64_t after = key + kAttentionBlock;
    if (!kStaged && after < end) {
      next = fetch(p.v, p.v_stride, after);
    }
    for_tiles(p.queries, [&](int64_t i, auto count) {
      constexpr int kQueries = decltype(count)::value;
      const float* weights = scratch + i * stride + (key - begin);
      if (i == 0 && !kStaged) {
        add_block<Kept, kQueries, true>(values, next, weights, stride, key == begin, sums, width);
      } else {
        add_block<Kept, kQueries, false>(values, next, weights, stride, key == begin, sums + i * width, width);
      }
    });
    if (kStaged && after < end) {
      next = fetch(p.v, p.v_stride, after);
    }
  }
}

template <class T>
void attend(const AttentionParams& p, int64_t b, int64_t head, int64_t split, float* scratch) {
  if constexpr (sizeof(T) >= 2) {
    if (p.width == p.head_dim) {
      return attend_split<T, false>(p, b, head, split, scratch);
    }
  }
  attend_split<T, true>(p, b, head, split, scratch);
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {{attend<float>, attend<BFloat16>, attend<Half>, attend<Float8E4M3>}};

}  // namespace MTP_ISA
}  // namespace mtp
