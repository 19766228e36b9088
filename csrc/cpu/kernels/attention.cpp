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
  for (int64_t i = 0; i < block.count; ++entry, slot = 0) {
    const int64_t asked = p.block_table(b, request.first_entry + entry);
    const int64_t id = asked < 0 ? 0 : asked >= p.num_pages ? p.num_pages - 1 : asked;
    const T* row = static_cast<const T*>(cache) + id * stride[0] + slot * stride[1] + head * stride[2];
    const int64_t of_page = p.page_size - slot;
    for (const int64_t end_of_page = i + of_page; i < block.count && i < end_of_page; ++i, row += stride[1]) {
      block.row[i] = row;
    }
  }
  for (int64_t i = block.count; i < kAttentionBlock; ++i) {
    block.row[i] = block.row[block.count - 1];
  }
  return block;
}

// One head of the block in fp32 in `staging`, zeros behind head_dim: for types that widen slowly and for rows that end
// in a step.
template <class T>
Block<float> stage(const Block<T>& block, int64_t head_offset, int64_t head_dim, int64_t width, float* staging) {
  Block<float> staged;
  staged.count = block.count;
  for (int64_t i = 0; i < kAttentionBlock; ++i) {
    if (i < block.count) {
      for (int64_t d = 0; d < width; d += kStep) {
        const Pair pair = load_pair(block.row[i] + head_offset + d, head_dim - d);
        __builtin_memcpy(staging + i * width + d, &pair, sizeof pair);
      }
      staged.row[i] = staging + i * width;
    } else {
      staged.row[i] = staged.row[i - 1];
    }
  }
  return staged;
}

// scores become exp(score - max), as floats or, where they meet values of bf16 in pairs, as those, packed from the
// row's start on; their maximum and sum. What is behind `count` up to a vector's end is overwritten.
template <bool kRounded>
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
    if constexpr (kRounded) {
      BFloat16* rounded = reinterpret_cast<BFloat16*>(scores) + j;
      store(rounded, weights);
      sums += load(rounded);
    } else {
      __builtin_memcpy(scores + j, &weights, sizeof weights);
      sums += weights;
    }
  }
  *greatest = top;
  *total = sum(sums);
}

// Asks memory for a block of all heads, of a task that nothing has been asked for yet.
template <class T>
void ask(const Block<T>& block, int64_t heads, int64_t head_stride, int64_t width) {
  for (int64_t i = 0; i < block.count; ++i) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t d = 0; d < width; d += kStep) {
        prefetch_step(block.row[i] + head * head_stride + d);
      }
    }
  }
}

template <class T, bool kStaged>
void attend_split(const AttentionParams& p, int64_t b, int64_t head, int64_t heads, int64_t split, float* scratch) {
  const AttentionRequest& request = p.requests[b];
  const int64_t begin = request.begin + split * request.split_keys;
  const int64_t end = begin + request.split_keys < request.end ? begin + request.split_keys : request.end;
  const int64_t part = request.first_part + split * p.num_kv_heads + head;
  const int64_t width = p.width, query_width = p.query_width, stride = p.score_stride;
  const float* queries = p.queries_ready + (b * p.num_kv_heads + head) * p.queries * query_width;
  constexpr bool kRounded = !kStaged && kPairs<T>;
  float* staging = scratch + heads * p.queries * stride;
  const auto find = [&](const void* cache, const int64_t* cache_stride, int64_t key) {
    return find_block<T>(p, request, b, head, key, end, cache, cache_stride);
  };
  // Calls body(rows, next rows, head) for the heads of a block; in the caches' type, or staged in fp32.
  const auto for_heads = [&](const Block<T>& block, const Block<T>& next, int64_t head_stride, const auto& body) {
    for (int64_t h = 0; h < heads; ++h) {
      if constexpr (kStaged) {
        const Block<float> staged = stage(block, h * head_stride, p.head_dim, width, staging);
        body(HeadRows<float>{staged, 0}, HeadRows<float>{staged, 0}, h);
      } else {
        body(HeadRows<T>{block, h * head_stride}, HeadRows<T>{next, h * head_stride}, h);
      }
    }
  };
  Block<T> next = find(p.k, p.k_stride, begin);
  if (!kStaged) {
    ask(next, heads, p.k_stride[2], width);
  }
  for (int64_t key = begin; key < end; key += kAttentionBlock) {
    const Block<T> keys = next;
    const int64_t after = key + kAttentionBlock;
    next = after < end ? find(p.k, p.k_stride, after) : find(p.v, p.v_stride, begin);
    for_heads(keys, next, p.k_stride[2], [&](const auto& rows, const auto& next_rows, int64_t h) {
      for_tiles(p.queries, [&](int64_t i, auto count) {
        constexpr int kQueries = decltype(count)::value;
        float* scores = scratch + (h * p.queries + i) * stride + (key - begin);
        const float* tile = queries + (h * p.queries + i) * query_width;
        if (i == 0 && !kStaged) {
          score_block<kQueries, true>(rows, next_rows, tile, width, scores, stride);
        } else {
          score_block<kQueries, false>(rows, next_rows, tile, width, scores, stride);
        }
      });
    });
  }
  for (int64_t i = 0; i < heads * p.queries; ++i) {
    softmax<kRounded>(scratch + i * stride, end - begin, p.logits_soft_cap, &p.partial_max[part * p.queries + i],
                      &p.partial_sum[part * p.queries + i]);
  }
  for (int64_t key = begin; key < end; key += kAttentionBlock) {
    const Block<T> values = next;
    const int64_t after = key + kAttentionBlock;
    if (after < end) {
      next = find(p.v, p.v_stride, after);
    }
    for_heads(values, next, p.v_stride[2], [&](const auto& rows, const auto& next_rows, int64_t h) {
      for_tiles(p.queries, [&](int64_t i, auto count) {
        constexpr int kQueries = decltype(count)::value;
        const float* weights = scratch + (h * p.queries + i) * stride + (key - begin) / (kRounded ? 2 : 1);
        float* sums = p.partial + ((part + h) * p.queries + i) * width;
        if (i == 0 && !kStaged) {
          add_block<kQueries, true>(rows, next_rows, weights, stride, key == begin, sums, width);
        } else {
          add_block<kQueries, false>(rows, next_rows, weights, stride, key == begin, sums, width);
        }
      });
    });
  }
}

template <class T>
void attend(const AttentionParams& p, int64_t b, int64_t head, int64_t heads, int64_t split, float* scratch) {
  if constexpr (sizeof(T) >= 2) {
    if (p.width == p.head_dim) {
      return attend_split<T, false>(p, b, head, heads, split, scratch);
    }
  }
  attend_split<T, true>(p, b, head, heads, split, scratch);
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {{attend<float>, attend<BFloat16>, attend<Half>, attend<Float8E4M3>}};

}  // namespace MTP_ISA
}  // namespace mtp
