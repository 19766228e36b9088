#include "mtp/heads.h"

#include "mtp/packed.h"
#include "mtp/vector_math.h"

namespace mtp::MTP_ISA {
namespace {

using vector_math::exp;
using vector_math::infinity;
using vector_math::max_of_lanes;
using vector_math::no_nan;

constexpr int64_t kRowBlock = 4;
// Rows of the weight at a time: as many accumulators as half of the vector registers.
constexpr int64_t kWeightBlock = kLanes == 16 ? 4 : 2;
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kTile = kHeadTile;

// Elements come in the order in which the parts of a weight with `parts` elements a word meet them.
template <class T>
void widen(const void* x, int64_t count, int parts, float* out) {
  const T* from = static_cast<const T*>(x);
  for (int64_t group = 0; group < count || group % kHeadPad != 0; group += parts * kLanes) {
    float values[4 * kLanes] = {};
    for (int64_t i = 0; i < parts * kLanes && group + i < count; i += kLanes) {
      const int64_t left = count - group - i;
      store(values + i, load_up_to(from + group + i, left));
    }
    if (kHasPairDot && __is_same(T, BFloat16) && parts == 2) {
      store_words(values, out + group);
      continue;
    }
    for (int j = 0; j < parts; ++j) {
      for (int i = 0; i < kLanes; ++i) {
        out[group + j * kLanes + i] = values[i * parts + j];
      }
    }
  }
}

// Adds the products of part kPart of a group, and of the parts behind it.
template <class T, int kPart, int kColumns, int kRows>
inline void add_parts(Floats (&sums)[kColumns][kRows], const Words (&words)[kColumns], const float* x,
                      int64_t x_stride) {
  if constexpr (kHasPairDot && __is_same(T, BFloat16)) {
    for (int r = 0; r < kRows; ++r) {
      const Words row = (Words)load(x + r * x_stride);
      for (int c = 0; c < kColumns; ++c) {
        sums[c][r] = pair_dot(sums[c][r], row, words[c]);
      }
    }
    return;
  }
  Floats rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = load(x + r * x_stride + kPart * kLanes);
  }
  for (int c = 0; c < kColumns; ++c) {
    const Floats w = part<T, kPart>(words[c]);
    for (int r = 0; r < kRows; ++r) {
      sums[c][r] += w * rows[r];
    }
  }
  if constexpr (kPart + 1 < kParts<T>) {
    add_parts<T, kPart + 1>(sums, words, x, x_stride);
  }
}

// kColumns rows of the weight with kRows rows of x; each product has one accumulator, whatever is beside it. Asks for
// the rows of the weight that come next, if the caller has any.
template <class T, int kColumns, int kRows>
inline void dot_block(const float* x, int64_t x_stride, const T* const* weight, const T* const* next, int64_t hidden,
                      float* out, int64_t out_stride) {
  constexpr int kElements = kGroup<T>;
  Floats totals[kColumns][kRows] = {};
  Words words[kColumns];
  int64_t i = 0;
  for (; i + kElements <= hidden; i += kElements) {
    for (int c = 0; c < kColumns; ++c) {
      words[c] = load_words(weight[c] + i);
    }
    if (next) {
      for (int c = 0; c < kColumns; ++c) {
        __builtin_prefetch(next[c] + i, 0, 2);
      }
    }
    add_parts<T, 0>(totals, words, x + i, x_stride);
  }
  if (i < hidden) {
    for (int c = 0; c < kColumns; ++c) {
      words[c] = load_words_some(weight[c] + i, hidden - i);
    }
    add_parts<T, 0>(totals, words, x + i, x_stride);
  }
#if MTP_LANES == 16
  if constexpr (kColumns == 4 && kRows == 4) {
    float all[kColumns * kRows];
    sums<kColumns * kRows>(totals[0], all);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        out[r * out_stride + c] = all[c * kRows + r];
      }
    }
    return;
  }
#endif
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kColumns == 4) {
      const Quad four = sums(totals[0][r], totals[1][r], totals[2][r], totals[3][r]);
      __builtin_memcpy(out + r * out_stride, &four, sizeof four);
    } else {
      for (int c = 0; c < kColumns; ++c) {
        out[r * out_stride + c] = sum(totals[c][r]);
      }
    }
  }
}

template <class T, int kColumns>
inline void dot_rows(const float* x, int64_t x_stride, int64_t rows, const T* const* weight, const T* const* next,
                     int64_t hidden, float* out, int64_t out_stride) {
  switch (rows) {
    case 4:
      return dot_block<T, kColumns, 4>(x, x_stride, weight, next, hidden, out, out_stride);
    case 3:
      return dot_block<T, kColumns, 3>(x, x_stride, weight, next, hidden, out, out_stride);
    case 2:
      return dot_block<T, kColumns, 2>(x, x_stride, weight, next, hidden, out, out_stride);
    default:
      return dot_block<T, kColumns, 1>(x, x_stride, weight, next, hidden, out, out_stride);
  }
}

// Where `count` rows of the weight begin, from `index` or from row `start` on.
template <class T>
inline void find_rows(const HeadDotsParams& p, const int64_t* index, int64_t start, int64_t count, const T** rows) {
  const T* weight = static_cast<const T*>(p.weight);
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = weight + (index ? index[start + i] : start + i) * p.weight_stride;
  }
}

// A tile is asked for while the one before it is worked on, and the next call's first one during the last: gathered
// rows lie in pages of their own, and what takes long is to find those.
template <class T>
void dots(const HeadDotsParams& p) {
  const T* tiles[2][kTile];
  int64_t size = p.count < kTile ? p.count : kTile;
  find_rows(p, p.index, 0, size, tiles[0]);
  for (int64_t i = 0; p.index && i < size; ++i) {
    for (int64_t j = 0; j < p.hidden; j += kLine / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(tiles[0][i] + j, 0, 2);
    }
  }
  for (int64_t start = 0; start < p.count; start += kTile) {
    const T* const* rows = tiles[start / kTile % 2];
    const T** next = tiles[(start / kTile + 1) % 2];
    const int64_t left = p.count - start - size;
    const int64_t next_size = left < kTile ? left : kTile;
    const bool last = next_size == 0;
    const int64_t asked = last ? p.count_behind : next_size;
    find_rows(p, last ? p.index_behind : p.index, last ? 0 : start + size, asked, next);
    for (int64_t r = 0; r < p.rows; r += kRowBlock) {
      const int64_t some = p.rows - r < kRowBlock ? p.rows - r : kRowBlock;
      const float* x = p.x + r * p.x_stride;
      float* out = p.out + r * p.out_stride + start;
      int64_t i = 0;
      for (; i + kWeightBlock <= size; i += kWeightBlock) {
        const bool ask = r == 0 && i + kWeightBlock <= asked;
        dot_rows<T, kWeightBlock>(x, p.x_stride, some, rows + i, ask ? next + i : nullptr, p.hidden, out + i,
                                  p.out_stride);
      }
      for (; i < size; ++i) {
        dot_rows<T, 1>(x, p.x_stride, some, rows + i, nullptr, p.hidden, out + i, p.out_stride);
      }
    }
    size = next_size;
  }
}

LogSum merge(LogSum a, LogSum b) {
  if (b.largest > a.largest) {
    const LogSum c = a;
    a = b;
    b = c;
  }
  // At -inf there is nothing to add, and at +inf nothing that counts.
  if (a.largest > -__builtin_inff() && a.largest < __builtin_inff()) {
    a.sum += b.sum * __builtin_exp(static_cast<double>(b.largest) - a.largest);
  }
  return a;
}

inline Floats load_value(const float* values, int64_t left) {
  Floats loaded = load_up_to(values, left);
  for (int64_t i = left; i < kLanes; ++i) {
    loaded[i] = -__builtin_inff();
  }
  return no_nan(loaded);
}

LogSum block_sum(const float* values, int64_t count) {
  Floats best = -infinity();
  for (int64_t i = 0; i < count; i += kLanes) {
    best = maximum(best, load_value(values + i, count - i));
  }
  const float largest = max_of_lanes(best);
  if (largest == -__builtin_inff() || largest == __builtin_inff()) {
    return {largest, 0.0};
  }
  Floats total{};
  for (int64_t i = 0; i < count; i += kLanes) {
    total += exp(load_value(values + i, count - i) - largest);
  }
  return {largest, sum(total)};
}

// Blocks of a fixed size, merged in order.
LogSum log_sum(const float* values, int64_t count) {
  LogSum total = {-__builtin_inff(), 0.0};
  for (int64_t i = 0; i < count; i += kLmHeadBlock) {
    total = merge(total, block_sum(values + i, count - i < kLmHeadBlock ? count - i : kLmHeadBlock));
  }
  return total;
}

int64_t token_at(const LmHeadParams& p, int64_t row) {
  if (!p.token_map) {
    return p.vocab_start + row;
  }
  return p.map_is_int64 ? static_cast<const int64_t*>(p.token_map)[row] : static_cast<const int32_t*>(p.token_map)[row];
}

// Keeps the k best of what has come, in order: higher value first, then lower id.
void insert(float* best, int64_t* ids, int64_t k, float value, int64_t id) {
  int64_t place = k - 1;
  if (!(value > best[place] || (value == best[place] && id < ids[place]))) {
    return;
  }
  for (; place > 0 && (value > best[place - 1] || (value == best[place - 1] && id < ids[place - 1])); --place) {
    best[place] = best[place - 1];
    ids[place] = ids[place - 1];
  }
  best[place] = value;
  ids[place] = id;
}

void best_of(const float* values, const int64_t* ids, int64_t count, int64_t k, float* best, int64_t* best_ids) {
  for (int64_t i = 0; i < k; ++i) {
    best[i] = -__builtin_inff();
    best_ids[i] = kNoId;
  }
  constexpr int64_t kGroup = 4 * kLanes;  // that are compared together with the worst of the best
  for (int64_t group = 0; group < count; group += kGroup) {
    const int64_t end = count - group < kGroup ? count : group + kGroup;
    Floats greatest = -infinity();
    for (int64_t i = group; i < end; i += kLanes) {
      greatest = maximum(greatest, load_value(values + i, end - i));
    }
    if (max_of_lanes(greatest) < best[k - 1]) {
      continue;
    }
    for (int64_t i = group; i < end; ++i) {
      const float value = values[i] == values[i] ? values[i] : -__builtin_inff();
      if (value >= best[k - 1]) {
        insert(best, best_ids, k, value, ids ? ids[i] : i);
      }
    }
  }
}

// Scale and cap, NaN as -inf; in place.
void finish_logits(const LmHeadParams& p, int64_t row, float* logits, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = count - i < kLanes ? count - i : kLanes;
    Floats values = load_up_to(logits + i, some);
    if (p.scale) {
      values *= load_up_to(p.scale + row + i, some);
    }
    if (p.soft_cap > 0.0f) {
      values = p.soft_cap * vector_math::tanh(values / p.soft_cap);
    }
    store_up_to(logits + i, no_nan(values), some);
  }
}

// Which of `count` rows of the weight name a suppressed token; false where none does.
bool find_suppressed(const LmHeadParams& p, int64_t row, int64_t count, bool* found) {
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = token_at(p, row + i);
    found[i] = false;
    for (int64_t n = 0; n < p.num_suppressed; ++n) {
      found[i] |= p.suppress_ids[n] == id;
    }
    any |= found[i];
  }
  return any;
}

template <class T>
void lm_head_chunk(const LmHeadParams& p, int64_t chunk) {
  float logits[kHeadRows * kLmHeadBlock];
  LogSum totals[kHeadRows];
  for (int64_t r = 0; r < p.rows; ++r) {
    totals[r] = {-__builtin_inff(), 0.0};
    for (int64_t i = 0; i < p.k; ++i) {
      p.best[(r * p.chunks + chunk) * p.k + i] = -__builtin_inff();
      p.best_ids[(r * p.chunks + chunk) * p.k + i] = kNoId;
    }
  }
  const int64_t begin = chunk * kLmHeadChunk;
  const int64_t end = p.vocab - begin < kLmHeadChunk ? p.vocab : begin + kLmHeadChunk;
  for (int64_t row = begin; row < end; row += kLmHeadBlock) {
    const int64_t count = end - row < kLmHeadBlock ? end - row : kLmHeadBlock;
    const T* weight = static_cast<const T*>(p.weight) + row * p.weight_stride;
    dots<T>(
        {p.x, p.x_stride, p.rows, weight, p.weight_stride, p.hidden, nullptr, count, logits, kLmHeadBlock, nullptr, 0});
    bool never[kLmHeadBlock];
    const bool some_never = p.num_suppressed > 0 && find_suppressed(p, row, count, never);
    for (int64_t r = 0; r < p.rows; ++r) {
      float* values = logits + r * kLmHeadBlock;
      float* best = p.best + (r * p.chunks + chunk) * p.k;
      int64_t* ids = p.best_ids + (r * p.chunks + chunk) * p.k;
      finish_logits(p, row, values, count);
      for (int64_t i = 0; some_never && i < count; ++i) {
        values[i] = never[i] ? -__builtin_inff() : values[i];
      }
      const LogSum block = block_sum(values, count);
      totals[r] = merge(totals[r], block);
      if (block.largest >= best[p.k - 1]) {
        for (int64_t i = 0; i < count; ++i) {
          if (values[i] >= best[p.k - 1]) {
            insert(best, ids, p.k, values[i], token_at(p, row + i));
          }
        }
      }
    }
  }
  for (int64_t r = 0; r < p.rows; ++r) {
    p.sums[r * p.chunks + chunk] = totals[r];
  }
}

}  // namespace

extern const HeadKernels heads;
const HeadKernels heads = {
    {widen<float>, widen<BFloat16>, widen<Half>},
    {dots<float>, dots<BFloat16>, dots<Half>, dots<Float8E4M3>},
    best_of,
    log_sum,
    merge,
    {lm_head_chunk<float>, lm_head_chunk<BFloat16>, lm_head_chunk<Half>, lm_head_chunk<Float8E4M3>},
};

}  // namespace mtp::MTP_ISA
