// What lies between two attentions of a draft step: merge of the chunks, o projection, feed-forward, and what follows
// (the next layer's queries, or the head's projections), in one launch whose blocks hand each other their results.
//
// At a hidden size of 256 a launch of its own for each product costs more than its arithmetic. Nothing waits for the
// grid here: blocks look for the words that they need (mail.h). So all blocks must be resident at a time: the grid is
// at most one block an SM, and the launch is cooperative.
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
__device__ __forceinline__ void multiply_all(float (&y)[tiles(kRows)][kSums][4], const bf16* x, int stride,
                                             const uint4 (&weight)[kQuad]) {
#pragma unroll
  for (int tile = 0; tile < tiles(kRows); ++tile) {
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const bf16* at = x + j * kPieceDepth + threadIdx.x % 4 * 8;
      const uint4 one = *reinterpret_cast<const uint4*>(at + row_of_lane<kRows>(tile, 0) * stride);
      uint4 two = make_uint4(0, 0, 0, 0);
      if (kRows > 8) {
        two = *reinterpret_cast<const uint4*>(at + row_of_lane<kRows>(tile, 1) * stride);
      }
      multiply(y[tile][j % kSums], one, two, weight[j]);
    }
  }
}

// x from the mail [rows, depth / 2], the depth shared by the warps of a block; y goes to the mail [rows, hidden].
template <int kRows>
__device__ __forceinline__ void project_split(const Segment& s, const Product& p, const uint64_t* from, uint64_t* to,
                                              uint32_t epoch, Queue& queue, Shared<kRows>& shared) {
  using Memory = Shared<kRows>;
  constexpr int kSplitRows = Memory::kSplitRows, kColumns = Memory::kColumns, kStride = kColumns + kPad;
  constexpr int kPairs = kSplitRows * kColumns / 4 / 32;  // of words, a lane
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int share = p.pieces * kPieceDepth;
  const int depth = share * kWarps;
  auto& mine = shared.warps[warp];
  const int count = units_of_block(p);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int unit = first_of_block(p) + i * static_cast<int>(gridDim.x);
    const int first_row = kRows > kSplitRows ? unit / p.column_units * kSplitRows : 0;
    const int n = (kRows > kSplitRows ? unit % p.column_units : unit) * kUnitColumns;
    const int rows = min(s.rows - first_row, kSplitRows);
    float y[tiles(kSplitRows)][kSums][4] = {};
#pragma unroll 1
    for (int begin = 0; begin < share; begin += kColumns) {
      const uint64_t* at = from + (first_row * depth + warp * share + begin) / 2;
      uint32_t words[2 * kPairs];
      const auto row = [&](int k) { return (k * 32 + lane) / (kColumns / 4); };
      const auto column = [&](int k) { return (k * 32 + lane) % (kColumns / 4) * 4; };
      receive<kPairs>(
          words, epoch, [&](int k) { return row(k) < rows && begin + column(k) < share; },
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
        multiply_all<kSplitRows>(y, &mine.x[0][c], kStride, weight);
      }
    }
    __syncwarp();  // what follows lies where x did
#pragma unroll
    for (int tile = 0; tile < tiles(kSplitRows); ++tile) {
#pragma unroll
      for (int half = 0; half < (kSplitRows > 8 ? 2 : 1); ++half) {
        if (kSplitRows > 1 || lane < 4) {
          float* sums = &mine.sums[row_of_lane<kSplitRows>(tile, half)][lane % 4 * 2];
          *reinterpret_cast<float2*>(sums) = make_float2(total(y[tile], half * 2), total(y[tile], half * 2 + 1));
        }
      }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < rows * 4) {
      const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
      float2 sum = *reinterpret_cast<const float2*>(&shared.warps[0].sums[row][column]);
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const float2 more = *reinterpret_cast<const float2*>(&shared.warps[w].sums[row][column]);
        sum.x += more.x;
        sum.y += more.y;
      }
      uint64_t* at = to + (first_row + row) * kHidden + n + column;
      post(at, word(__float_as_uint(sum.x), epoch), word(__float_as_uint(sum.y), epoch));
    }
    __syncthreads();
  }
}

// Products of the normed rows, a unit a warp. The halves of the depth are summed apart, as where they are two warps'.
template <int kRows>
__device__ __forceinline__ void project(const Segment& s, int number, uint32_t epoch, Queue& queue,
                                        Shared<kRows>& shared) {
  const Product& p = s.products[number];
  const int lane = threadIdx.x % 32;
  const int count = units_of_block(p);
  const int columns = p.columns;
#pragma unroll 1
  for (int i = first_of_warp(p); i < count; i += kWarps) {
    float y[tiles(kRows)][4], gate[tiles(kRows)][4];
#pragma unroll 1
    for (int side = 0; side < (p.second != 0 ? 2 : 1); ++side) {
#pragma unroll 1
      for (int half = 0; half < kHalves; ++half) {
        float sums[tiles(kRows)][kSums][4] = {};
        uint4 weight[kQuad];
        queue.pop(weight);
        multiply_all<kRows>(sums, &shared.normed[0][half * kHalfDepth], kHidden + kPad, weight);
#pragma unroll
        for (int tile = 0; tile < tiles(kRows); ++tile) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            gate[tile][k] = half == 0 ? y[tile][k] : gate[tile][k];
            y[tile][k] = half == 0 ? total(sums[tile], k) : y[tile][k] + total(sums[tile], k);
          }
        }
      }
    }
    const int n = (first_of_block(p) + i * static_cast<int>(gridDim.x)) * kUnitColumns + lane % 4 * 2;
#pragma unroll
    for (int group = 0; group < (kRows + 7) / 8; ++group) {
      const int row = group * 8 + lane / 4, tile = group / 2, k = group % 2 * 2;
      float one = y[tile][k], two = y[tile][k + 1];
      const int64_t at = static_cast<int64_t>(row) * columns + n;
      if (number == kGateUp) {
        one *= gelu_tanh(gate[tile][k]);
        two *= gelu_tanh(gate[tile][k + 1]);
        if (row < s.rows) {
          post(s.mail_inner + at / 2, word(pack(one, two), epoch));
        }
      } else if (number == kNext) {
        if (row < s.rows) {
          *reinterpret_cast<uint32_t*>(static_cast<bf16*>(s.output) + at) = pack(one, two);
        }
      } else {
        one = one == one ? one : -INFINITY;
        two = two == two ? two : -INFINITY;
        float largest = fmaxf(one, two);
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
        if (row < s.rows) {
          *reinterpret_cast<float2*>(s.scores + at) = make_float2(one, two);
          s.group_max[at / kUnitColumns] = largest;
        }
      }
    }
  }
}

// The gated activations of few rows: each warp has half the depth of one matrix of one of two units.
template <int kRows>
__device__ __forceinline__ void project_quarters(const Segment& s, uint32_t epoch, Queue& queue,
                                                 Shared<kRows>& shared) {
  const Product& p = s.products[kGateUp];
  const int lane = threadIdx.x % 32;
  const int count = units_of_block(p);
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    if (i + unit_of_quarter() < count) {
      float sums[1][kSums][4] = {};
      uint4 weight[kQuad];
      queue.pop(weight);
      multiply_all<kRows>(sums, &shared.normed[0][half_of_quarter() * kHalfDepth], kHidden + kPad, weight);
      if (kRows > 1 || lane < 4) {
        float* to = &shared.warps[threadIdx.x / 32].sums[row_of_lane<kRows>(0, 0)][lane % 4 * 2];
        *reinterpret_cast<float2*>(to) = make_float2(total(sums[0], 0), total(sums[0], 1));
      }
    }
    __syncthreads();
    const int row = threadIdx.x / 8, unit = threadIdx.x / 4 % 2, column = threadIdx.x % 4 * 2;
    if (row < s.rows && i + unit < count) {
      const auto both_halves = [&](int side) {
        const auto* const halves = &shared.warps[unit * 4 + side * 2];
        const float2 one = *reinterpret_cast<const float2*>(&halves[0].sums[row][column]);
        const float2 two = *reinterpret_cast<const float2*>(&halves[1].sums[row][column]);
        return make_float2(one.x + two.x, one.y + two.y);
      };
      const float2 gate = both_halves(0), up = both_halves(1);
      const int n = (first_of_block(p) + (i + unit) * static_cast<int>(gridDim.x)) * kUnitColumns + column;
      post(s.mail_inner + (static_cast<int64_t>(row) * p.columns + n) / 2,
           word(pack(gelu_tanh(gate.x) * up.x, gelu_tanh(gate.y) * up.y), epoch));
    }
    __syncthreads();
  }
}

// Registers of a thread, of which there are 65536 an SM: a block of 8 rows leaves what two programs of a sliding
// layer's attention take (96 a thread), so that each may start while the other still runs. GPUs before sm_90 start none
// early.
#if __CUDA_ARCH__ >= 900
constexpr int kRegistersOf8Rows = 160;
#else
constexpr int kRegistersOf8Rows = 255;
#endif

template <int kRows>
__global__ void __maxnreg__(kRows == 8 ? kRegistersOf8Rows : 255) run_segment(const __grid_constant__ Segment s) {
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
  const Attention& a = s.attention;
  const bool counts = static_cast<int>(threadIdx.x) < s.rows && a.partial != nullptr;
  const int64_t length = counts ? length_of(a, threadIdx.x) : 0;
  Queue queue(s, memory + sizeof(shared));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    shared.norms[i][threadIdx.x] = elements[i];
  }
  if (counts) {
    shared.chunks[threadIdx.x] = count_chunks(a, length);
  }
  __syncthreads();
  wait_for_others();
  uint32_t epoch = *static_cast<volatile uint32_t*>(s.epoch) + 1;
  epoch += epoch == 0;  // that of words which nobody has written yet

  merge<kRows <= 1 ? 1 : kRows <= 8 ? 2 : 4>(s, epoch, shared);
  float x[Shared<kRows>::kHeld];
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const bool last = half == 1;
    uint64_t* const mail = last ? s.mail_down : s.mail_o;
    const uint64_t* const from = last ? s.mail_inner : s.mail_attended;
    project_split(s, s.products[last ? kDown : kOutput], from, mail, epoch, queue, shared);
    __syncthreads();  // the rows of the half before are read until here
    Step step{mail, nullptr, s.mail_normed + s.rows * kHidden / 2, kPostFeedforward, kNextNorm, scalar, true};
    if (!last) {
      step = {mail, static_cast<const bf16*>(s.residual), s.mail_normed, kPostAttention, kPreFeedforward, 1.0f, false};
    }
    take_in(s, step, epoch, x, shared);
    if (last && blockIdx.x == 0 && threadIdx.x == 0) {
      *static_cast<volatile uint32_t*>(s.epoch) =
          epoch;  // every block had to read it before a row of this mail was full
    }
    if constexpr (kRows <= 8) {
      if (!last) {
        project_quarters(s, epoch, queue, shared);
        continue;
      }
    }
#pragma unroll 1
    for (int number = last ? kNext : kGateUp; number < (last ? s.num_products : kDown); ++number) {
      project(s, number, epoch, queue, shared);
    }
  }
}

template <int kRows>
constexpr int bytes() {
  return static_cast<int>(sizeof(Shared<kRows>) + kQuads * Queue::kQuadBytes);
}

// What a block asks for: of one row half of what an SM has, and each block takes 1 KB more, so that no SM gets two
// where others are still taken by the kernel in front. A block of more rows has too many registers for a second one.
template <int kRows>
cudaError_t bytes_of_block(bool early, int& found) {
  found = bytes<kRows>();
  if (kRows > 1 || !early) {
    return cudaSuccess;
  }
  int device = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  error = error ? error : cudaDeviceGetAttribute(&each, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  found = std::max(found, each / 2);
  return error;
}

template <int kRows>
cudaError_t launch(const Segment& s, int blocks, bool early, void* stream) {
  const auto kernel = run_segment<kRows>;
  int wanted = 0;
  cudaError_t error = bytes_of_block<kRows>(early, wanted);
  error = error ? error : share_memory(kernel, wanted);
  return error ? error : launch_kernel(kernel, s, dim3(blocks), kThreads, wanted, {early, true}, stream);
}

}  // namespace

int launch_segment(const Segment& s, int blocks, bool early, void* stream) {
  return static_cast<int>(s.rows <= 1    ? launch<1>(s, blocks, early, stream)
                          : s.rows <= 8  ? launch<8>(s, blocks, early, stream)
                          : s.rows <= 16 ? launch<16>(s, blocks, early, stream)
                          : s.rows <= 32 ? launch<32>(s, blocks, early, stream)
                                         : launch<64>(s, blocks, early, stream));
}

int segment_bytes(int rows) {
  return rows <= 1    ? bytes<1>()
         : rows <= 8  ? bytes<8>()
         : rows <= 16 ? bytes<16>()
         : rows <= 32 ? bytes<32>()
                      : bytes<64>();
}

}  // namespace mtp::cuda
