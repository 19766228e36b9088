// What comes before and behind the splits of draft_attention: queries made ready, and splits merged into results.
#include "mtp/attention.h"
#include "mtp/packed.h"
#include "mtp/vector_math.h"

namespace mtp {
namespace MTP_ISA {
namespace {

constexpr int64_t kStep = kPair;

template <class Weight, class T>
void norm(const T* q, const Weight* weight, float eps, int64_t head_dim, float* x) {
  Floats squares[2] = {};
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Floats values = load_up_to(q + d, head_dim - d);
    squares[d / kLanes % 2] += values * values;
  }
  const float mean = sum(squares[0] + squares[1]) / static_cast<float>(head_dim);
  const float factor = 1.0f / __builtin_sqrtf(mean + eps);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Floats y = load_up_to(q + d, head_dim - d) * factor * load_up_to(weight + d, head_dim - d);
    __builtin_memcpy(x + d, &y, sizeof y);
  }
}

void turn(float* x, int64_t half, int64_t pairs, const float* sine, const float* cosine) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float one = x[i], two = x[half + i];
    x[i] = one * cosine[i] - two * sine[i];
    x[half + i] = two * cosine[i] + one * sine[i];
  }
}

template <class T>
void prepare(const AttentionParams& p, int64_t b, int64_t row, float* scratch) {
  const int64_t num_heads = p.num_kv_heads * p.group;
  const AttentionRequest& request = p.requests[b];
  if (request.splits == 0) {
    T* output = static_cast<T*>(p.output) + (b * p.rows + row) * num_heads * p.head_dim;
    __builtin_memset(output, 0, static_cast<unsigned long>(num_heads * p.head_dim) * sizeof(T));
    return;
  }
  float* x = scratch;
  float* angle = scratch + p.width;
  float* sine = angle + p.width;
  float* cosine = sine + p.width;
  if (p.inv_freq) {
    const float position = static_cast<float>(p.positions(b, row));
    for (int64_t i = 0; i < p.num_pairs; ++i) {
      angle[i] = position * p.inv_freq[i];
    }
    for (int64_t i = 0; i < p.num_pairs; i += kLanes / 2) {
      for (int64_t j = p.num_pairs; j < i + kLanes / 2; ++j) {
        angle[j] = 0.0f;
      }
      vector_math::sine_cosine(angle + i, sine + i, cosine + i);
    }
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    const T* q = static_cast<const T*>(p.q) + b * p.q_stride[0] + row * p.q_stride[1] + head * p.q_stride[2];
    if (!p.norm_weight) {
      for (int64_t d = 0; d < p.head_dim; d += kLanes) {
        const Floats y = load_up_to(q + d, p.head_dim - d);
        __builtin_memcpy(x + d, &y, sizeof y);
      }
    } else if (p.norm_is_float) {
      norm(q, static_cast<const float*>(p.norm_weight), p.norm_eps, p.head_dim, x);
    } else {
      norm(q, static_cast<const T*>(p.norm_weight), p.norm_eps, p.head_dim, x);
    }
    turn(x, p.head_dim / 2, p.num_pairs, sine, cosine);
    for (int64_t d = p.head_dim; d < p.width; ++d) {
      x[d] = 0.0f;
    }
    const int64_t kv_head = head / p.group;
    const float scale = p.sm_scale * (p.k_scale ? p.k_scale[kv_head * p.k_scale_stride] : 1.0f);
    const int64_t query = row * p.group + head % p.group;
    const int64_t first = query - query % kAttentionTile;  // of the query's tile, the last one perhaps smaller
    const int64_t tile = p.queries - first < kAttentionTile ? p.queries - first : kAttentionTile;
    const int64_t size = p.rounded ? kLanes : kStep;  // floats of a step
    float* ready =
        p.queries_ready + ((b * p.num_kv_heads + kv_head) * p.queries + first) * p.query_width + (query - first) * size;
    for (int64_t d = 0; d < p.width; d += kStep, ready += tile * size) {
      Pair pair = {load(x + d), load(x + d + kLanes)};
      pair = p.paired ? evens_and_odds(pair) : pair;
      pair = {pair.first * scale, pair.second * scale};
      if (p.rounded) {
        const Words words = round_words<BFloat16>(pair);
        __builtin_memcpy(ready, &words, sizeof words);
      } else {
        __builtin_memcpy(ready, &pair, sizeof pair);
      }
    }
  }
}

// The splits' weights exp(max - greatest max) / (sum of all) in place of their maxima. The splits are added in order.
void weigh(const AttentionParams& p, const AttentionRequest& request, int64_t head, int64_t query, float v_scale) {
  const int64_t first = (request.first_part + head) * p.queries + query;
  const int64_t stride = p.num_kv_heads * p.queries;
  float most = -__builtin_inff();
  for (int64_t split = 0; split < request.splits; ++split) {
    const float value = p.partial_max[first + split * stride];
    most = value > most ? value : most;
  }
  most = most == -__builtin_inff() ? 0.0f : most;
  float total = 0.0f;
  for (int64_t split = 0; split < request.splits; ++split) {
    float& weight = p.partial_max[first + split * stride];
    weight = vector_math::exp(broadcast(weight - most))[0];
    total += weight * p.partial_sum[first + split * stride];
  }
  for (int64_t split = 0; split < request.splits; ++split) {
    p.partial_max[first + split * stride] *= v_scale / total;
  }
}

template <class T>
void merge(const AttentionParams& p, int64_t b, int64_t head, int64_t query, float* scratch) {
  const AttentionRequest& request = p.requests[b];
  const int64_t stride = p.num_kv_heads * p.queries;  // from a split to the next
  weigh(p, request, head, query, p.v_scale ? p.v_scale[head * p.v_scale_stride] : 1.0f);
  const int64_t first = (request.first_part + head) * p.queries + query;
  for (int64_t d = 0; d < p.width; d += kStep) {
    Floats total[2] = {};
    for (int64_t split = 0; split < request.splits; ++split) {
      const float* partial = p.partial + (first + split * stride) * p.width + d;
      const Floats weight = broadcast(p.partial_max[first + split * stride]);
      total[0] += weight * load(partial);
      total[1] += weight * load(partial + kLanes);
    }
    const Pair pair = p.paired ? in_turn({total[0], total[1]}) : Pair{total[0], total[1]};
    __builtin_memcpy(scratch + d, &pair, sizeof pair);
  }
  const int64_t row = query / p.group, qo_head = head * p.group + query % p.group;
  T* output = static_cast<T*>(p.output) + ((b * p.rows + row) * p.num_kv_heads * p.group + qo_head) * p.head_dim;
  for (int64_t d = 0; d < p.head_dim; d += kLanes) {
    store_up_to(output + d, load(scratch + d), p.head_dim - d);
  }
}

}  // namespace

extern const AttentionEnds attention_ends;
const AttentionEnds attention_ends = {kStep,
                                      kHasPairDot,
                                      {prepare<float>, prepare<BFloat16>, prepare<Half>},
                                      {merge<float>, merge<BFloat16>, merge<Half>}};

}  // namespace MTP_ISA
}  // namespace mtp
