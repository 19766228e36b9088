#include "mtp/sampling.h"

#include "mtp/vector_math.h"

namespace mtp::MTP_ISA {
namespace {

using vector_math::infinity;
using vector_math::no_nan;

constexpr int kBlock = 64;  // columns at a time, a multiple of every kLanes
constexpr int kSums = 16;   // sums in fp64 that run beside each other, the same for every instruction set

// Philox-4x32-10's first word for ids of kBlock columns; see mtp_kernels/reference/_philox.py.
void philox(const int64_t* ids, int64_t offset, int64_t seed, uint32_t* words) {
  uint32_t a[kBlock], b[kBlock], c[kBlock], d[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    a[i] = static_cast<uint32_t>(ids[i]);
    b[i] = static_cast<uint32_t>(static_cast<uint64_t>(ids[i]) >> 32);
    c[i] = static_cast<uint32_t>(offset);
    d[i] = static_cast<uint32_t>(static_cast<uint64_t>(offset) >> 32);
  }
  uint32_t first = static_cast<uint32_t>(seed);
  uint32_t second = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlock; ++i) {
      const uint64_t one = uint64_t{a[i]} * 0xD2511F53u;
      const uint64_t two = uint64_t{c[i]} * 0xCD9E8D57u;
      a[i] = static_cast<uint32_t>(two >> 32) ^ b[i] ^ first;
      c[i] = static_cast<uint32_t>(one >> 32) ^ d[i] ^ second;
      b[i] = static_cast<uint32_t>(two);
      d[i] = static_cast<uint32_t>(one);
    }
    first += 0x9E3779B9u;
    second += 0xBB67AE85u;
  }
  __builtin_memcpy(words, a, sizeof a);
}

// Standard Gumbel noise: u = min((fp32(word) + 0.5) 2^-32, 1 - 2^-24), and -log(-log1p(-u)).
inline Floats gumbel(const uint32_t* words) {
  Words bits;
  __builtin_memcpy(&bits, words, sizeof bits);
  // Halves are exact in fp32, so their sum is the one rounding of the conversion.
  const Floats high = __builtin_convertvector((Ints)(bits >> 16), Floats);
  const Floats low = __builtin_convertvector((Ints)(bits & 0xffffu), Floats);
  const Floats u = (high * 65536.0f + low + 0.5f) * 0x1p-32f;
  const Floats below_one = broadcast(1.0f - 0x1p-24f);
  return -vector_math::log(-vector_math::log1p(-select(u < below_one, u, below_one)));
}

// kBlock values, with `filler` behind the first `count`.
template <class T>
void load_block(const void* row, int64_t start, int64_t count, float filler, float* out) {
  const T* from = static_cast<const T*>(row) + start;
  if (count >= kBlock) {
    for (int i = 0; i < kBlock; i += kLanes) {
      store(out + i, load(from + i));
    }
    return;
  }
  for (int64_t i = 0; i < kBlock; ++i) {
    out[i] = i < count ? load_one(from + i) : filler;
  }
}

template <class T>
float largest(const void* logits, int64_t count) {
  Floats best = -infinity();
  float values[kBlock];
  for (int64_t start = 0; start < count; start += kBlock) {
    load_block<T>(logits, start, count - start, -__builtin_inff(), values);
    for (int i = 0; i < kBlock; i += kLanes) {
      best = maximum(best, no_nan(load(values + i)));
    }
  }
  return vector_math::max_of_lanes(best);
}

bool better(const Draw& a, float noisy, int64_t id, float scaled) {
  if (noisy != a.noisy) {
    return noisy > a.noisy;
  }
  return id < a.id || (id == a.id && scaled > a.scaled);
}

// (logits - largest) / temperature: the largest gives exactly 0, -inf stays, and beside +inf all others become -inf.
inline Floats below_best(Floats logits, float largest, float temperature) {
  const Floats below = select(logits == largest, Floats{}, logits - largest);
  const Floats kept = select(logits == -infinity(), -infinity(), below);
  return select(kept == -infinity(), -infinity(), kept / temperature);
}

template <class T>
Draw sample_chunk(const SampleChunkParams& p) {
  Draw best = {-__builtin_inff(), -__builtin_inff(), INT64_MAX, 0.0};
  double sums[kSums] = {};
  for (int64_t start = 0; start < p.count; start += kBlock) {
    const int64_t count = p.count - start < kBlock ? p.count - start : kBlock;
    int64_t ids[kBlock] = {};
    for (int64_t i = 0; i < count; ++i) {
      ids[i] = !p.token_ids      ? p.first + start + i
               : p.ids_are_int64 ? static_cast<const int64_t*>(p.token_ids)[start + i]
                                 : static_cast<const int32_t*>(p.token_ids)[start + i];
    }
    uint32_t words[kBlock];
    if (p.warm) {
      philox(ids, p.offset, p.seed, words);
    }
    float scaled[kBlock], noisy[kBlock], powers[kBlock];
    load_block<T>(p.logits, start, count, -__builtin_inff(), scaled);
    Floats highest = -infinity();
    for (int i = 0; i < kBlock; i += kLanes) {
      const Floats below = below_best(no_nan(load(scaled + i)), p.largest, p.temperature);
      const Floats value = p.warm ? below + gumbel(words + i) : below;
      highest = maximum(highest, value);
      store(scaled + i, below);
      store(noisy + i, value);
      store(powers + i, vector_math::exp(below));
    }
    for (int i = 0; i < kBlock; i += kSums) {
      for (int j = 0; j < kSums; ++j) {
        sums[j] += static_cast<double>(powers[i + j]);
      }
    }
    if (vector_math::max_of_lanes(highest) >= best.noisy) {
      for (int64_t i = 0; i < count; ++i) {
        if (better(best, noisy[i], ids[i], scaled[i])) {
          best = {noisy[i], scaled[i], ids[i], 0.0};
        }
      }
    }
  }
  for (int j = 0; j < kSums; ++j) {
    best.sum += sums[j];
  }
  return best;
}

template <class T>
void probabilities(const void* row, int64_t count, double total, double* out) {
  float values[kBlock];
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t some = count - start < kBlock ? count - start : kBlock;
    load_block<T>(row, start, some, 0.0f, values);
    for (int64_t i = 0; i < some; ++i) {
      const bool good = values[i] > 0.0f && values[i] < __builtin_inff();
      out[start + i] = good ? static_cast<double>(values[i]) : 0.0;
    }
  }
  if (total != 1.0) {
    for (int64_t i = 0; i < count; ++i) {
      out[i] /= total;
    }
  }
}

double sum(const double* values, int64_t count) {
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int j = 0; j < kSums; ++j) {
      sums[j] += values[i + j];
    }
  }
  for (int j = 0; i + j < count; ++j) {
    sums[j] += values[i + j];
  }
  double total = 0.0;
  for (int j = 0; j < kSums; ++j) {
    total += sums[j];
  }
  return total;
}

}  // namespace

extern const SamplingKernels sampling;
const SamplingKernels sampling = {
    {largest<float>, largest<BFloat16>, largest<Half>},
    {sample_chunk<float>, sample_chunk<BFloat16>, sample_chunk<Half>},
    {probabilities<float>, probabilities<BFloat16>, probabilities<Half>},
    sum,
};

}  // namespace mtp::MTP_ISA
