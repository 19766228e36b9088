// What happens to whole rows before and behind a projection: RMS norm, gathering, the residual connection.
#include "mtp/linear.h"
#include "mtp/packed.h"

namespace mtp::MTP_ISA {
namespace {

template <class T>
inline const T* elements(const void* data) {
  return static_cast<const T*>(data);
}

// 1 / sqrt(mean(x^2) + eps); the order of the sum depends on the number of columns alone.
template <class T>
float inverse_rms(const T* x, int64_t columns, float eps) {
  Floats first = {};
  Floats second = {};
  for (int64_t k = 0; k < columns; k += kPair) {
    const Pair pair = load_pair(x + k, columns - k);
    first += pair.first * pair.first;
    second += pair.second * pair.second;
  }
  return 1.0f / __builtin_sqrtf(sum(first + second) / static_cast<float>(columns) + eps);
}

template <class T>
void pack_row(const T* x, int64_t columns, float* packed) {
  for (int64_t k = 0; k < columns; k += kPair, packed += kPackedPair<T>) {
    store_packed<T>(packed, load_pair(x + k, columns - k), columns - k);
  }
}

template <class T, class W>
void norm_row(const NormRowsParams& p, const T* x, float* packed, T* normed) {
  const W* weight = elements<W>(p.norm_weight);
  const float factor = inverse_rms(x, p.columns, p.eps);
  for (int64_t k = 0; k < p.columns; k += kPair, packed += kPackedPair<T>) {
    const int64_t left = p.columns - k;
    const Pair values = load_pair(x + k, left);
    const Pair scale = load_pair_like<T>(weight + k, left);
    Pair result = {values.first * factor * scale.first, values.second * factor * scale.second};
    if (normed) {
      result = round_pair<T>(result);
      store_pair(normed + k, result, left);
    }
    store_packed<T>(packed, result, left);
  }
}

template <class T>
void norm_rows(const NormRowsParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = elements<T>(p.x[row]);
    float* packed = p.packed + row * p.packed_stride;
    T* normed = p.normed ? static_cast<T*>(p.normed) + row * p.columns : nullptr;
    if (!p.norm_weight) {
      pack_row(x, p.columns, packed);
    } else if (p.norm_weight_is_float) {
      norm_row<T, float>(p, x, packed, normed);
    } else {
      norm_row<T, T>(p, x, packed, normed);
    }
  }
}

template <class T>
void embed_rows(const EmbedRowsParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* embed = elements<T>(p.embed[row]);
    float* packed = p.packed + row * p.packed_stride;
    for (int64_t k = 0; k < p.columns; k += kPair) {
      const int64_t left = p.columns - k;
      Pair pair = {};
      if (embed) {
        pair = load_pair(embed + k, left);
        pair = round_pair<T>({pair.first * p.embed_scale, pair.second * p.embed_scale});
      }
      store_packed<T>(packed + k / kPair * kPackedPair<T>, pair, left);
    }
    if (p.state) {
      pack_row(elements<T>(p.state[row]), p.columns, packed + p.segment_stride);
    }
  }
}

template <class S, class T, class W>
void add_norm_row(const AddNormRowsParams& p, const S* projected, const T* residual, float scale, T* y) {
  const W* weight = elements<W>(p.norm_weight);
  const float factor = inverse_rms(projected, p.columns, p.eps);
  for (int64_t k = 0; k < p.columns; k += kLanes) {
    const int64_t left = p.columns - k;
    const Floats normed = load_up_to(projected + k, left) * factor * load_up_to(weight + k, left);
    store_up_to(y + k, (load_up_to(residual + k, left) + normed) * scale, left);
  }
}

template <class T>
void add_norm_rows(const AddNormRowsParams& p, int64_t begin, int64_t end) {
  const float scale = !p.scale ? 1.0f : p.scale_is_float ? *elements<float>(p.scale) : load_one(elements<T>(p.scale));
  for (int64_t row = begin; row < end; ++row) {
    const float* projected = p.projected ? p.projected + row * p.columns : nullptr;
    const T* x = p.x ? elements<T>(p.x[row]) : nullptr;
    const T* residual = elements<T>(p.residual[row]);
    T* y = static_cast<T*>(p.y) + row * p.columns;
    if (projected && p.norm_weight_is_float) {
      add_norm_row<float, T, float>(p, projected, residual, scale, y);
    } else if (projected) {
      add_norm_row<float, T, T>(p, projected, residual, scale, y);
    } else if (p.norm_weight_is_float) {
      add_norm_row<T, T, float>(p, x, residual, scale, y);
    } else {
      add_norm_row<T, T, T>(p, x, residual, scale, y);
    }
  }
}

}  // namespace

extern const LinearRowsKernels linear_rows_kernels = {
    {norm_rows<float>, norm_rows<BFloat16>, norm_rows<Half>},
    {embed_rows<float>, embed_rows<BFloat16>, embed_rows<Half>},
    {add_norm_rows<float>, add_norm_rows<BFloat16>, add_norm_rows<Half>},
};

}  // namespace mtp::MTP_ISA
