// Projections of a few rows: params and tables of csrc/cpu/kernels/linear.cpp and linear_rows.cpp.
//
// The rows to be multiplied are first packed as fp32 into a workspace (normed, gathered, or just widened), so that the
// products read each weight once for all of them. A packed row is `segments` pieces of `columns` floats, each at a
// multiple of packed_columns(columns), zeros behind it up to a whole pair of vectors; the order within a pair is that
// of mtp/packed.h. Where the processor multiplies pairs of bf16 (kHasPairDot), what meets a weight of bf16 is rounded
// to bf16, as the matrix products of PyTorch and of the Triton kernels do, and a pair takes half the room.
#pragma once

#include <stdint.h>

namespace mtp {

// The element types of inputs; the tables below have an entry for each, in this order.
constexpr int kElementTypes = 3;  // fp32, bf16, fp16

// A piece's room in a packed row: whole pairs of the widest vectors.
constexpr int64_t kPackedUnit = 32;

// Floats between two packed rows: a cache line, since rows that lie a power of two apart drive each other out of the
// first cache. E2B's projections from 2048 to 256, batch 8, bf16, 2 cores: 46 us without, 42 with it.
constexpr int64_t kPackedPad = 16;

// Weight rows that a part of the parallel loop is made of.
constexpr int64_t kWeightRows = 16;

struct NormRowsParams {
  const void* const* x;     // [rows] of [columns]
  const void* norm_weight;  // [columns]; null: the rows are packed as they are
  bool norm_weight_is_float;
  float eps;
  int64_t columns;
  float* packed;          // [rows, packed_stride]
  int64_t packed_stride;  // in elements
  void* normed;           // [rows, columns], contiguous; null, or the normed rows rounded, which are packed then
};

struct EmbedRowsParams {
  const void* const* embed;  // [rows] of [columns]; null: a zero row
  const void* const* state;  // [rows] of [columns]; null pointers: no second piece
  float embed_scale;
  int64_t columns;
  float* packed;          // [rows, packed_stride]
  int64_t packed_stride;  // in elements
  int64_t segment_stride;
};

struct LinearParams {
  const float* packed;  // [rows, packed_stride]
  int64_t packed_stride;
  int64_t segment_stride;  // of `packed`; the weight's pieces lie side by side
  int64_t segments;
  int64_t columns;
  int64_t rows;
  const void* weight;     // [out, segments * columns], or [2 * out, ...] for geglu: the gate's rows, then up's
  int64_t weight_stride;  // in elements
  int64_t out;
  void* y;  // [rows, out], contiguous
};

struct AddNormRowsParams {
  const void* const* x;     // [rows] of [columns]; null where `projected` is given
  const float* projected;   // [rows, columns], contiguous
  const void* norm_weight;  // [columns]
  bool norm_weight_is_float;
  float eps;
  const void* const* residual;  // [rows] of [columns]
  const void* scale;            // one element; null: 1
  bool scale_is_float;
  int64_t columns;
  void* y;  // [rows, columns], contiguous
};

struct LinearKernels {
  // y = packed @ weight.T for the weight rows [begin, end), rounded to the weight's type, or left in fp32.
  void (*linear[kElementTypes])(const LinearParams& p, int64_t begin, int64_t end);
  void (*linear_float[kElementTypes])(const LinearParams& p, int64_t begin, int64_t end);
  // y = gelu_tanh(gate) * up for the columns [begin, end) of y.
  void (*geglu[kElementTypes])(const LinearParams& p, int64_t begin, int64_t end);
};

struct LinearRowsKernels {
  // Each for the rows [begin, end).
  void (*norm[kElementTypes])(const NormRowsParams& p, int64_t begin, int64_t end);
  void (*embed[kElementTypes])(const EmbedRowsParams& p, int64_t begin, int64_t end);
  void (*add_norm[kElementTypes])(const AddNormRowsParams& p, int64_t begin, int64_t end);
};

}  // namespace mtp
