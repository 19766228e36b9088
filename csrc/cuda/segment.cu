// What lies between two attentions of a draft step: merge of the chunks, o projection, feed-forward, and what follows
// (the next layer's queries, or the head's projections), in one launch whose blocks hand each other their results.
//
// At a hidden size of 256 a launch of its own for each product costs more than its arithmetic. Nothing waits for the
// grid here: blocks look for the words that they need (mail.h). So all blocks must be resident at a time: the grid is
// at most one block an SM, and the launch is cooperative. Of more rows than one the blocks are up to four groups, each
// of which has some of the rows and nothing to ask of the others: a block then waits for the words of few rows alone.
//
// A product is y[row, n] = x[row, :] . weight[n, :]. Eight columns n are a unit: the N of one tensor core instruction,
// whose M are up to 16 rows. Columns of the depth are dealt to lanes in another order than the instruction's, the same
// for x and weight, so that a lane's share of a row is 16 bytes in a row. The order of a sum follows the depth alone,
// so a row's bits do not depend on how many there are.
#include "segment.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "device.h"
#include "launch.h"
#include "mail.h"
#include "merge.h"
#include "norms.h"
#include "queue.h"
#include "shared.h"

namespace mtp::cuda {
namespace {

// Four pieces of weights times those columns of x [rows, stride] in shared memory.
template <int kRows>
__device__ __forceinline__ void multiply_all(float (&y)[kSums][4], const bf16* x, int stride,
                                             const uint4 (&weight)[kQuad]) {
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    const bf16* at = x + j * kPieceDepth + threadIdx.x % 4 * 8;
    const uint4 one = *reinterpret_cast<const uint4*>(at + row_of_lane<kRows>(0) * stride);
    uint4 two = make_uint4(0, 0, 0, 0);
    if (kRows > 8) {
      two = *reinterpret_cast<const uint4*>(at + row_of_lane<kRows>(1) * stride);
    }
    multiply(y[j % kSums], one, two, weight[j]);
  }
}

// y = the normed rows times some halves of the depth of a unit, each of which is summed apart.
template <int kRows>
__device__ __forceinline__ void multiply_normed(float (&y)[4], int first_half, int count, Queue& queue,
                                                const Shared<kRows>& shared) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float sums[kSums][4] = {};
    uint4 weight[kQuad];
    queue.pop(weight);
    multiply_all<kRows>(sums, &shared.normed[0][(first_half + i) * kHalfDepth], kHidden + kPad, weight);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      y[k] = i == 0 ? total(sums, k) : y[k] + total(sums, k);
    }
  }
}

// A warp's sums, to where the block adds those of its warps.
template <int kRows>
__device__ __forceinline__ void set_down(const float (&y)[4], float (&sums)[kRows][kUnitColumns]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < (kRows > 8 ? 2 : 1); ++half) {
    if (lane / 4 < kRows) {
      *reinterpret_cast<float2*>(&sums[row_of_lane<kRows>(half)][lane % 4 * 2]) =
          make_float2(y[half * 2], y[half * 2 + 1]);
    }
  }
}

// What kCount warps set down, added in their order, of two columns.
template <int kCount, class Warp>
__device__ __forceinline__ float2 sum_of_warps(const Warp* warps, int row, int column) {
  float2 sum = *reinterpret_cast<const float2*>(&warps[0].sums[row][column]);
#pragma unroll
  for (int w = 1; w < kCount; ++w) {
    const float2 more = *reinterpret_cast<const float2*>(&warps[w].sums[row][column]);
    sum.x += more.x;
    sum.y += more.y;
  }
  return sum;
}

// x from the mail [rows, depth / 2], the depth shared by the warps of a block; y goes to the mail [rows, hidden].
template <int kRows>
__device__ __forceinline__ void project_split(const Group& group, const Product& p, const uint64_t* from, uint64_t* to,
                                              uint32_t epoch, Queue& queue, Shared<kRows>& shared) {
  constexpr int kColumns = Shared<kRows>::kColumns, kStride = kColumns + kPad;
  constexpr int kPairs = kRows * kColumns / 4 / 32;  // of words, a lane
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int share = p.pieces * kPieceDepth;
  const int depth = share * kWarps;
  auto& mine = shared.warps[warp];
  const int count = units_of_block(p, group);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float y[4], sums[kSums][4] = {};
#pragma unroll 1
    for (int begin = 0; begin < share; begin += kColumns) {
      const uint64_t* at = from + (warp * share + begin) / 2;
      uint32_t words[2 * kPairs];
      const auto row = [&](int k) { return (k * 32 + lane) / (kColumns / 4); };
      const auto column = [&](int k) { return (k * 32 + lane) % (kColumns / 4) * 4; };
      receive<kPairs>(
          words, epoch, [&](int k) { return row(k) < group.rows && begin + column(k) < share; },
          [&](int k) { return at + (row(k) * depth + column(k)) / 2; });
      __syncwarp();  // the columns before are read until here
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        *reinterpret_cast<uint2*>(&mine.x[row(k)][column(k)]) = make_uint2(words[2 * k], words[2 * k + 1]);
      }
      __syncwarp();
#pragma unroll 1
      for (int c = 0; c < kColumns && begin + c < share; c += kQuad * kPieceDepth) {
        uint4 weight[kQuad];
        queue.pop(weight);
        multiply_all<kRows>(sums, &mine.x[0][c], kStride, weight);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      y[k] = total(sums, k);
    }
    __syncwarp();  // what follows lies where x did
    set_down(y, mine.sums);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < group.rows * 4) {
      const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
      const float2 sum = sum_of_warps<kWarps>(shared.warps, row, column);
      const int n = (first_of_block(p, group) + i * group.blocks) * kUnitColumns + column;
      post(to + row * kHidden + n, word(__float_as_uint(sum.x), epoch), word(__float_as_uint(sum.y), epoch));
    }
    __syncthreads();
  }
}

// Products of the normed rows, a unit a warp, to memory. The halves of the depth are summed apart, as where they are
// two warps'.
template <int kRows>
__device__ __forceinline__ void project(const Segment& s, const Group& group, int number, Queue& queue,
                                        const Shared<kRows>& shared) {
  const Product& p = s.products[number];
  const int lane = threadIdx.x % 32;
  const int count = units_of_block(p, group);
#pragma unroll 1
  for (int i = first_of_warp(p); i < count; i += kWarps) {
    float y[4];
    multiply_normed<kRows>(y, 0, kHalves, queue, shared);
    const int n = (first_of_block(p, group) + i * group.blocks) * kUnitColumns + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < (kRows > 8 ? 2 : 1); ++half) {
      const int row = half * 8 + lane / 4;
      const bool live = row < group.rows;
      float one = y[half * 2], two = y[half * 2 + 1];
      const int64_t at = static_cast<int64_t>(group.first_row + row) * p.columns + n;
      if (number == kNext) {
        if (live) {
          *reinterpret_cast<uint32_t*>(static_cast<bf16*>(s.output) + at) = pack(one, two);
        }
      } else {
        one = one == one ? one : -INFINITY;
        two = two == two ? two : -INFINITY;
        float largest = fmaxf(one, two);
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
        if (live) {
          *reinterpret_cast<float2*>(s.scores + at) = make_float2(one, two);
          s.group_max[at / kUnitColumns] = largest;
        }
      }
    }
  }
}

// The gated activations, to the mail [rows, columns / 2]. So many warps share a unit that few have none: of each matrix
// a warp has the whole depth, or half.
template <int kRows, bool kAlone, int kWarpsEach = 1 << log2_gated_warps(kAlone ? 1 : 2)>
__device__ __forceinline__ void project_gated(const Segment& s, const Group& group, uint64_t* to, uint32_t epoch,
                                              Queue& queue, Shared<kRows>& shared) {
  constexpr int kSides = 2, kShares = kWarpsEach / kSides;
  constexpr int kUnits = kWarps / kWarpsEach;  // at a time
  const Product& p = s.products[kGateUp];
  const int warp = threadIdx.x / 32;
  const int count = units_of_block(p, group);
#pragma unroll 1
  for (int i = 0; i < count; i += kUnits) {
    if (i + warp / kWarpsEach < count) {
      float y[4];
      multiply_normed<kRows>(y, warp % kShares * (kHalves / kShares), kHalves / kShares, queue, shared);
      set_down(y, shared.warps[warp].sums);
    }
    __syncthreads();
    const int unit = threadIdx.x / (kRows * 4), row = threadIdx.x / 4 % kRows, column = threadIdx.x % 4 * 2;
    if (unit < kUnits && i + unit < count && row < group.rows) {
      const auto* const gates = &shared.warps[unit * kWarpsEach];
      const float2 gate = sum_of_warps<kShares>(gates, row, column);
      const float2 up = sum_of_warps<kShares>(gates + kShares, row, column);
      const int n = (first_of_block(p, group) + (i + unit) * group.blocks) * kUnitColumns + column;
      post(to + (row * p.columns + n) / 2, word(pack(gelu_tanh(gate.x) * up.x, gelu_tanh(gate.y) * up.y), epoch));
    }
    __syncthreads();
  }
}

// Registers of a thread, of which there are 65536 an SM: a block leaves what a block of 4 warps of the next attention
// takes (176 a thread), so that each may start while the other still runs. GPUs before sm_90 start none early.
#if __CUDA_ARCH__ >= 900
constexpr int kMostRegisters = 168;
#else
constexpr int kMostRegisters = 255;
#endif

// kRows: of a group, rounded up. kAlone: it is the only one, of one row.
template <int kRows, bool kAlone>
__global__ void __maxnreg__(kMostRegisters) run_segment(const __grid_constant__ Segment s) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kRows>*>(memory);
  let_others_start();
  // Weights are never written, and lengths not by a kernel, so they may be read before the kernels in front have ended;
  // nothing else may.
  const void* norms[4] = {s.post_attention_norm, s.pre_feedforward_norm, s.post_feedforward_norm, s.next_norm};
  bf16 elements[4];  // on their way while the queue is made
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    elements[i] = static_cast<const bf16*>(norms[i])[threadIdx.x];
  }
  const float scalar = s.layer_scalar == nullptr ? 1.0f : __bfloat162float(*static_cast<const bf16*>(s.layer_scalar));
  const Group group = group_of(s);
  const Attention& a = s.attention;
  const bool counts = static_cast<int>(threadIdx.x) < group.rows && a.partial != nullptr;
  const int64_t length = counts ? length_of(a, group.first_row + threadIdx.x) : 0;
  Queue queue(s, group, memory + sizeof(shared));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    shared.norms[i][threadIdx.x] = elements[i];
  }
  if (counts) {
    shared.chunks[threadIdx.x] = count_chunks(a, length);
  }
  __syncthreads();
  wait_for_others();
  uint32_t epoch = static_cast<uint32_t>(*static_cast<volatile uint64_t*>(s.epochs + group.number)) + 1;
  epoch += epoch == 0;  // that of words which nobody has written yet

  uint64_t* const attended = s.mail_attended + group.first_row * s.attended_columns / 2;
  uint64_t* const inner = s.mail_inner + group.first_row * s.inner_columns / 2;
  merge<kRows <= 1 ? 1 : kRows <= 2 ? 2 : 4>(s, group, epoch, shared);
  float x[Shared<kRows>::kHeld];
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const bool last = half == 1;
    const int at = group.first_row * kHidden;
    uint64_t* const mail = (last ? s.mail_down : s.mail_o) + at;
    project_split(group, s.products[last ? kDown : kOutput], last ? inner : attended, mail, epoch, queue, shared);
    __syncthreads();  // the rows of the half before are read until here
    uint64_t* const normed = s.mail_normed + at / 2;
    Step step{mail, nullptr, normed + s.rows * kHidden / 2, kPostFeedforward, kNextNorm, scalar, true};
    if (!last) {
      step = {mail, static_cast<const bf16*>(s.residual) + at, normed, kPostAttention, kPreFeedforward, 1.0f, false};
    }
    take_in(s, group, step, epoch, x, shared);
    if (last && group.block == 0 && threadIdx.x < kMostGroups) {
      // Every block of the group had to read it before a row of this mail was full. Groups that are not there keep up.
      const int number = threadIdx.x;
      if (number == group.number || (group.number == 0 && number * s.group_blocks >= static_cast<int>(gridDim.x))) {
        *static_cast<volatile uint64_t*>(s.epochs + number) = epoch;
      }
    }
    if (!last) {
      project_gated<kRows, kAlone>(s, group, inner, epoch, queue, shared);
      continue;
    }
#pragma unroll 1
    for (int number = kNext; number < s.num_products; ++number) {
      project(s, group, number, queue, shared);
    }
  }
}

template <int kRows>
constexpr int bytes() {
  return static_cast<int>(sizeof(Shared<kRows>) + kQuads * Queue::kQuadBytes);
}

// What a block asks for: half of what an SM has at least, and each block takes 1 KB more, so that no SM gets two where
// others are still taken by the kernel in front.
template <int kRows>
cudaError_t bytes_of_block(bool early, int& found) {
  found = bytes<kRows>();
  if (!early) {
    return cudaSuccess;
  }
  int device = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  error = error ? error : cudaDeviceGetAttribute(&each, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  found = std::max(found, each / 2);
  return error;
}

template <int kRows, bool kAlone = false>
cudaError_t launch(const Segment& s, bool early, void* stream) {
  const auto kernel = run_segment<kRows, kAlone>;
  int wanted = 0;
  cudaError_t error = bytes_of_block<kRows>(early, wanted);
  error = error ? error : share_memory(kernel, wanted);
  const int blocks = count_groups(s.rows) * s.group_blocks;
  return error ? error : launch_kernel(kernel, s, dim3(blocks), kThreads, wanted, {early, true}, stream);
}

}  // namespace

int launch_segment(const Segment& s, bool early, void* stream) {
  return static_cast<int>(s.rows == 1         ? launch<1, true>(s, early, stream)
                          : s.group_rows <= 1 ? launch<1>(s, early, stream)
                          : s.group_rows <= 2 ? launch<2>(s, early, stream)
                          : s.group_rows <= 4 ? launch<4>(s, early, stream)
                          : s.group_rows <= 8 ? launch<8>(s, early, stream)
                                              : launch<16>(s, early, stream));
}

int segment_bytes(int rows) {
  const int each = rows_of_group(rows);
  return each <= 1   ? bytes<1>()
         : each <= 2 ? bytes<2>()
         : each <= 4 ? bytes<4>()
         : each <= 8 ? bytes<8>()
                     : bytes<16>();
}

}  // namespace mtp::cuda
