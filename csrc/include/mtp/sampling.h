// The sampling kernels: one chunk of a row of logits or of probabilities at a time.
#pragma once

#include <stdint.h>

namespace mtp {

constexpr int64_t kSampleChunk = 4096;  // columns that one task takes
constexpr int64_t kDrawChunk = 2048;    // probabilities in fp64 that are held at a time

struct SampleChunkParams {
  const void* logits;  // [count], of a row
  int64_t count;       // at most kSampleChunk
  float largest;       // of the row
  bool warm;           // whether there is noise
  float temperature;   // 1 without noise
  int64_t seed;
  int64_t offset;
  int64_t first;          // the column of the first logit, which is its id if there are no token_ids
  const void* token_ids;  // [count] int32 or int64, or null
  bool ids_are_int64;
};

// The best of a chunk: the highest noisy value, then the lowest id, then the highest value before the noise.
struct Draw {
  float noisy;
  float scaled;
  int64_t id;
  double sum;  // of exp(scaled), over the chunk
};

// The arrays are by element type: fp32, bf16, fp16.
struct SamplingKernels {
  float (*largest[3])(const void* logits, int64_t count);  // NaN as -inf
  Draw (*sample_chunk[3])(const SampleChunkParams& p);
  // out[i] = row[i] / total in fp64; what is no probability counts as 0. A total of 1 does not divide.
  void (*probabilities[3])(const void* row, int64_t count, double total, double* out);
  double (*sum)(const double* values, int64_t count);
};

}  // namespace mtp
