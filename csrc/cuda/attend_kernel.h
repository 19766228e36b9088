// draft_attention over caches of 512 elements a key, for 16 queries at most: the first kernel, whose chunks or folds of
// chunks a merge follows (triton_ops/_attention_merge.py, merge.h).
//
// Blocks live as long as the launch. All parts of all requests lie in a row, and each block has an equal share of it
// for one KV head; the blocks of other heads have the same share, so that what lies side by side in memory is read at
// the same time. A block's keys stream through shared memory: where a launch starts early they fill it before the
// queries are there.
//
// A tile is 32 keys. The four warps multiply, each, 16 of the keys by half of their depth, hand each other the sums
// through shared memory, and then all compute the same maxima and exponentials, so that one barrier a tile is enough;
// of the values each has a quarter of the columns. So a warp loads for itself alone what it reads.
//
// Chunks are a request's own: which block has one, and what else it has, changes no bit.
#pragma once

#include <algorithm>
#include <cstddef>

#include "attend.h"
#include "chunks.h"
#include "device.h"

namespace mtp::cuda {
namespace {

constexpr int kAttendWarps = 4;
constexpr int kAttendThreads = 32 * kAttendWarps;
constexpr int kShareBytes = 8192;  // of a tile's K or V, a warp's: 16 keys x 256 columns, or 32 keys x 128
constexpr int kSteps = 16;         // of a depth of 16 in a warp's half of the queries
constexpr int kSlabs = 8;          // of 16 columns in a warp's values
constexpr float kLog2E = 1.4426950408889634f;

// A part of the keys of a request, for one KV head.
struct Unit {
  int b, part;  // b: -1 behind the last unit of a block
  int chunk;    // keys of one
  unsigned begin, end;
};

// Of which a warp has to know at a time: it asks for keys of the last while it reads those of the first.
__host__ __device__ constexpr int units_ahead(int ring) { return ring <= 4 ? 4 : 8; }

// Queries, and averages of a fold of chunks, of as many queries as there are. 8 queries go into registers before there
// are folds; 16 stay where they are.
template <int kTiles>
struct QueriesAndFolds {
  bf16 q[8 * kTiles][kAttendDim + 8];
  float folds[1][kAttendDim + 4];
};

template <>
struct QueriesAndFolds<1> {
  union {
    bf16 q[8][kAttendDim + 8];
    float folds[1][kAttendDim + 4];
  };
};

// kTiles: of 8 queries. kRing: shares of K and V that a warp has on the way, in turn.
template <int kTiles, int kRing>
struct AttendShared {
  unsigned char ring[kAttendWarps][kRing][kShareBytes];
  Unit units[kAttendWarps][units_ahead(kRing)];
  union {
    float scores[2][2][8 * kTiles][kAttendKeys + 8];  // of either half of the depth, for one tile and the next
    float2 turns[kAttendDim / 2];                     // of queries that are one row
  };
  bf16 norm[kAttendDim];
  QueriesAndFolds<kTiles> last;
};

__device__ __forceinline__ int64_t load_index(const void* at, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(at)[i] : static_cast<const int32_t*>(at)[i];
}

// What a request's queries see.
struct Visible {
  int64_t table;  // its first entry
  int first;      // key
  int keys;
  int chunk;  // keys of one
  int parts;
};

__device__ __forceinline__ Visible visible_of(const Attend& a, int b) {
  Visible found;
  int64_t entries = a.table_size;
  found.table = b * a.table_stride;
  if (a.indptr != nullptr) {
    const int64_t begin = load_index(a.indptr, a.indptr_is_int64, b);
    const int64_t end = load_index(a.indptr, a.indptr_is_int64, b + 1);
    found.table = min(max(begin, int64_t{0}), a.table_size);
    entries = max(min(end, a.table_size) - found.table, int64_t{0});
  }
  const int64_t capacity = min(entries * a.page_size, int64_t{0x7fffffff});
  const auto length = static_cast<int>(min(max(load_index(a.lengths, a.lengths_are_int64, b), int64_t{0}), capacity));
  found.keys = min(length, a.bound);
  found.first = length - found.keys;
  found.chunk = keys_of_chunk(found.keys, a.chunk_weight, a.log2_max_chunks, kAttendKeys);
  found.parts = min(how_many(how_many(found.keys, found.chunk), a.chunks_a_part), a.parts);
  return found;
}

// The units of a block, in their order.
class Units {
 public:
  __device__ explicit Units(const Attend& a) {
    int total = 0;
#pragma unroll 1
    for (int first = (a.batch - 1) / 32 * 32; first >= 0; first -= 32) {
      upto_ = count(a, first);
      total += __shfl_sync(kAll, upto_, 31);
    }
    const int groups = static_cast<int>(gridDim.x) / a.kv_heads, group = static_cast<int>(blockIdx.x) / a.kv_heads;
    next_ = static_cast<int>(static_cast<int64_t>(total) * group / groups);
    left_ = static_cast<int>(static_cast<int64_t>(total) * (group + 1) / groups) - next_;
  }

  // The next unit; behind the last one b is -1.
  __device__ __forceinline__ Unit find(const Attend& a) {
    if (left_ == 0) {
      return {-1, 0, 0, 0, 0};
    }
    if (part_ == parts_) {
      for (int here; next_ >= (here = __shfl_sync(kAll, upto_, 31));) {
        next_ -= here;
        first_ += 32;
        upto_ = count(a, first_);
      }
      const int owner = __ffs(__ballot_sync(kAll, upto_ > next_)) - 1;
      const int below = __shfl_sync(kAll, upto_, max(owner - 1, 0));
      b_ = first_ + owner;
      part_ = next_ - (owner > 0 ? below : 0);
      const Visible seen = visible_of(a, b_);
      table_ = seen.table;
      parts_ = seen.parts;
      chunk_ = seen.chunk;
      begin_ = seen.first + static_cast<unsigned>(part_) * (static_cast<unsigned>(chunk_) * a.chunks_a_part);
      end_ = seen.first + seen.keys;
    }
    Unit unit = {b_, part_, chunk_, begin_, begin_ + static_cast<unsigned>(chunk_) * a.chunks_a_part};
    begin_ = unit.end;
    unit.end = min(unit.end, end_);
    ++part_;
    ++next_;
    --left_;
    return unit;
  }

  // Where the table of the last unit's request begins.
  __device__ __forceinline__ int64_t table() const { return table_; }

 private:
  // Parts of 32 requests, a lane each, with those of the lanes below it.
  static __device__ __forceinline__ int count(const Attend& a, int first) {
    const int lane = threadIdx.x % 32;
    int upto = first + lane < a.batch ? visible_of(a, first + lane).parts : 0;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int more = __shfl_up_sync(kAll, upto, i);
      upto += lane >= i ? more : 0;
    }
    return upto;
  }

  int next_;       // part, counted from the first of lane 0's request on
  int left_;       // parts of the block
  int first_ = 0;  // request of lane 0
  int upto_ = 0;
  int b_ = 0, part_ = 0, parts_ = 0, chunk_ = 0;
  unsigned begin_ = 0, end_ = 0;  // of the next part, and of all the request's keys
  int64_t table_ = 0;
};

// A warp's shares of the block's tiles on their way: K of a tile, its V, K of the next one. Nothing is before the first
// tile but a share of values that are not there, behind which the first unit is looked for.
template <int kRing>
class Stream {
 public:
  __device__ Stream(const Attend& a, int head, Unit* found, const void* ring)
      : units_(a), found_(found), head_(head), base_(shared_address(ring)) {}

  __device__ __forceinline__ void push_keys(const Attend& a) {
    __syncwarp();
    if (more_) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const auto page = static_cast<uint32_t>(min(max(entry_, int64_t{0}), static_cast<int64_t>(a.num_pages - 1)));
      at_ = page * a.stride_page + in_page_ * a.stride_slot;
      seen_ = __ballot_sync(kAll, key_ + lane < end_);
      const auto* from = reinterpret_cast<const unsigned char*>(
          static_cast<const bf16*>(a.k) + head_ * a.k_stride_head + warp / 2 * (kAttendDim / 2) + lane * 8);
      const uint64_t policy = read_once();
#pragma unroll 8
      for (int i = 0; i < 16; ++i) {
        copy_16(base_ + slot_ + i * 512 + ((lane ^ (i & 7)) * 16), from, warp % 2 * 16 + i, policy);
      }
    }
    end_push();
  }

  __device__ __forceinline__ void push_values(const Attend& a) {
    __syncwarp();
    if (more_) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const auto* from = reinterpret_cast<const unsigned char*>(
          static_cast<const bf16*>(a.v) + head_ * a.v_stride_head + warp * (kAttendDim / kAttendWarps) + lane % 16 * 8);
      const uint64_t policy = read_once();
#pragma unroll 8
      for (int i = 0; i < 16; ++i) {
        const int row = 2 * i + lane / 16;
        copy_16(base_ + slot_ + row * 256 + ((lane % 16 ^ (row & 7)) * 16), from, row, policy);
      }
      key_ += kAttendKeys;
    }
    if (key_ >= end_ && !ended_) {
      const Unit unit = units_.find(a);
      more_ = unit.b >= 0;
      ended_ = !more_;
      key_ = unit.begin;
      end_ = unit.end;
      if (threadIdx.x % 32 == 0) {
        found_[count_ % units_ahead(kRing)] = unit;
      }
      ++count_;
    }
    const unsigned mine = key_ + threadIdx.x % 32;
    if (mine < end_) {
      const unsigned index = mine / static_cast<unsigned>(a.page_size);
      in_page_ = mine - index * a.page_size;
      entry_ = load_index(a.table, a.table_is_int64, units_.table() + index);
    }
    end_push();
  }

  // Waits for the oldest share; it lies where the next one will.
  __device__ __forceinline__ uint32_t pop() {
    wait_for_copies<kRing - 1>();
    __syncwarp();
    return base_ + slot_;
  }

 private:
  __device__ __forceinline__ void copy_16(uint32_t to, const unsigned char* from, int row, uint64_t policy) {
    const uint32_t at = __shfl_sync(kAll, at_, row);
    const int bytes = (seen_ >> row & 1) * 16;  // the others are zeros
    copy_16_bytes(to, from + static_cast<int64_t>(at) * 16, bytes, policy);
  }

  __device__ __forceinline__ void end_push() {
    commit_copies();
    slot_ = slot_ + kShareBytes == kRing * kShareBytes ? 0 : slot_ + kShareBytes;
  }

  Units units_;
  Unit* const found_;  // in shared memory, in turn
  const int head_;
  uint32_t base_, slot_ = (kRing - 1) * kShareBytes;
  int count_ = 0;
  bool more_ = false, ended_ = false;
  unsigned key_ = 0, end_ = 0;  // of the unit that is asked for
  int64_t entry_ = 0;           // of the table, for a lane's key of the next tile
  uint32_t in_page_ = 0;
  uint32_t at_ = 0;  // of a lane's key of the tile, in both caches, in units of 8 elements
  uint32_t seen_ = 0;
};

// Sine and cosine of fp32 angles as in triton_ops/_attention_math.py: exact quarter turns, then Taylor series.
__device__ __forceinline__ float2 sine_and_cosine(float x) {
  const uint32_t bits = __float_as_uint(x);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 150;
  const auto mantissa = static_cast<uint64_t>((bits & 0x7fffff) | 0x800000);
  const uint64_t factor = 0x28BE60DB9391054Aull >> min(max(-exponent, 0), 63);
  const uint64_t turns = mantissa * (factor << min(max(exponent, 0), 38));  // of 2^-62 quarters, modulo four
  const uint64_t quadrant = (turns + (uint64_t{1} << 61)) >> 62;
  const float r = static_cast<float>(static_cast<int64_t>(turns - (quadrant << 62))) * 3.4061215800865545e-19f;
  const float z = r * r;
  const float s = r + r * z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040 + z * (1.0f / 362880))));
  const float c = 1.0f + z * (-0.5f + z * (1.0f / 24 + z * (-1.0f / 720 + z * (1.0f / 40320 - z * (1.0f / 3628800)))));
  const bool odd = (quadrant & 1) != 0;
  float sine = odd ? c : s, cosine = odd ? s : c;
  sine = ((quadrant & 2) != 0) != (static_cast<int32_t>(bits) < 0) ? -sine : sine;
  cosine = ((quadrant + 1) & 2) != 0 ? -cosine : cosine;
  return make_float2(sine, cosine);
}

__device__ __forceinline__ int row_of(const Attend& a, int query) { return query * a.group_inverse >> 16; }

// How a row turns, for all warps.
template <class Shared>
__device__ __forceinline__ void make_turns(const Attend& a, int b, int row, Shared& shared) {
  const auto position = static_cast<float>(
      load_index(a.positions, a.positions_are_int64, b * a.position_stride_batch + row * a.position_stride));
#pragma unroll 1
  for (int pair = threadIdx.x; pair < kAttendDim / 2; pair += kAttendThreads) {
    shared.turns[pair] = pair < a.num_pairs ? sine_and_cosine(position * a.freq[pair]) : make_float2(0.0f, 1.0f);
  }
}

// The queries of a request and a KV head, normed and turned, into shared memory; zeros where there is none. All that is
// in global memory of a row is asked for before the first of it is waited for. `waits` for the kernels in front.
template <int kTiles, class Shared>
__device__ __forceinline__ void load_queries(const Attend& a, int b, int head, bool waits, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kEach = 8 * kTiles / kAttendWarps;
#pragma unroll 1
  for (int row = 0; row < a.rows; ++row) {
    __syncthreads();  // what was there before is read until here
    if (a.freq != nullptr) {
      make_turns(a, b, row, shared);
    }
    __syncthreads();
    if (waits && row == 0) {
      wait_for_others();
    }
    uint4 found[kEach][2];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int member = j * kAttendWarps + warp;
      if (member < a.group) {
        const auto* from = static_cast<const bf16*>(a.q) + b * a.q_stride_batch + row * a.q_stride_row +
                           (head * a.group + member) * a.q_stride_head + lane * 8;
        found[j][0] = __ldcg(reinterpret_cast<const uint4*>(from));
        found[j][1] = __ldcg(reinterpret_cast<const uint4*>(from + kAttendDim / 2));
      }
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int member = j * kAttendWarps + warp;
      if (member >= a.group) {
        break;
      }
      float x[2][8];
      float squares = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[half][i] = __bfloat162float(reinterpret_cast<const bf16*>(&found[j][half])[i]);
          squares = __fmaf_rn(x[half][i], x[half][i], squares);
        }
      }
      if (a.norm != nullptr) {
        const float factor = __frcp_rn(__fsqrt_rn(warp_sum(squares) * (1.0f / kAttendDim) + a.eps));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const bf16 norm = shared.norm[half * (kAttendDim / 2) + lane * 8 + i];
            x[half][i] = x[half][i] * factor * __bfloat162float(norm);
          }
        }
      }
      if (a.freq != nullptr) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 turn = shared.turns[lane * 8 + i];
          const float one = x[0][i], two = x[1][i];
          x[0][i] = __fmaf_rn(one, turn.y, -(two * turn.x));
          x[1][i] = __fmaf_rn(two, turn.y, one * turn.x);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint4*>(&shared.last.q[row * a.group + member][half * (kAttendDim / 2) + lane * 8]) =
            make_uint4(pack(x[half][0], x[half][1]), pack(x[half][2], x[half][3]), pack(x[half][4], x[half][5]),
                       pack(x[half][6], x[half][7]));
      }
    }
  }
#pragma unroll 1
  for (int query = a.rows * a.group + warp; query < 8 * kTiles; query += kAttendWarps) {
    auto* to = reinterpret_cast<uint4*>(&shared.last.q[query][lane * 8]);
    to[0] = to[kAttendDim / 16] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
}

// A chunk, or a fold of them: maximum and sum of the query lane / 4 of each tile, the sum of a lane's own keys alone;
// and averages, not divided by it, of the queries lane % 4 * 2 and the next, of 16 columns a slab.
template <int kTiles>
struct Sums {
  float top[kTiles];
  float total[kTiles];
  float y[kTiles][kSlabs][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      top[t] = -INFINITY;
      total[t] = 0.0f;
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          y[t][slab][k] = 0.0f;
        }
      }
    }
  }
};

// Of a factor of the query lane / 4, those of the two queries whose averages a lane has.
__device__ __forceinline__ float2 for_averages(float factor) {
  const int lane = threadIdx.x % 4 * 8;
  return make_float2(__shfl_sync(kAll, factor, lane), __shfl_sync(kAll, factor, lane + 4));
}

// A fold of chunks: as a chunk's sums, but the averages are in shared memory.
template <int kTiles>
struct Fold {
  float top[kTiles];
  float total[kTiles];
};

// Where an average of a lane's is: of the query t * 8 + lane % 4 * 2 + i.
__device__ __forceinline__ int column_of(int slab, int below) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return warp * (kAttendDim / kAttendWarps) + slab * 16 + below * 8 + lane / 4;
}

// A chunk's sums, complete, into those before it: the arithmetic of the merge.
template <int kTiles, class Shared>
__device__ __forceinline__ void fold_chunk(Fold<kTiles>& into, const Sums<kTiles>& chunk, bool first, int queries,
                                           Shared& shared) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float best = first ? chunk.top[t] : fmaxf(into.top[t], chunk.top[t]);
    const float base = best == -INFINITY ? 0.0f : best;
    const float shrink = exp2_approx(into.top[t] - base), new_shrink = exp2_approx(chunk.top[t] - base);
    into.total[t] = first ? chunk.total[t] : __fmaf_rn(into.total[t], shrink, __fmul_rn(chunk.total[t], new_shrink));
    into.top[t] = best;
    const float2 one = for_averages(shrink), two = for_averages(new_shrink);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int query = t * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + k % 2;
      if (query < queries) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          float& at = shared.last.folds[query][column_of(slab, k / 2)];
          const float y = chunk.y[t][slab][k];
          at = first ? y : __fmaf_rn(at, k % 2 == 0 ? one.x : one.y, __fmul_rn(y, k % 2 == 0 ? two.x : two.y));
        }
      }
    }
  }
}

// A part to where the merge finds it: `average(t, slab, k)` of a lane's.
template <int kTiles, class Average>
__device__ __forceinline__ void leave(const Attend& a, int head, const Unit& unit, const float (&top)[kTiles],
                                      const float (&total)[kTiles], Average average) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto line_of = [&](int query) {
    const int64_t row = static_cast<int64_t>(unit.b) * a.rows + row_of(a, query);
    const int member = query - row_of(a, query) * a.group;
    return (row * (a.kv_heads * a.group) + head * a.group + member) * a.parts + unit.part;
  };
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int own = t * 8 + lane / 4;
    if (warp == 0 && lane % 4 == 0 && own < a.rows * a.group) {
      *reinterpret_cast<float2*>(a.stats + line_of(own) * 2) = make_float2(top[t], total[t]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = t * 8 + lane % 4 * 2 + i;
      if (query < a.rows * a.group) {
        float* at = a.partial + line_of(query) * kAttendDim;
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          at[column_of(slab, 0)] = average(t, slab, i);
          at[column_of(slab, 1)] = average(t, slab, i + 2);
        }
      }
    }
  }
}

template <int kTiles, int kRing, bool kFolds>
__global__ void __launch_bounds__(kAttendThreads, kTiles == 1 ? 3 : 2) attend(const __grid_constant__ Attend a) {
  static_assert(kRing % 2 == 1, "values are pushed when keys have been read");
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<AttendShared<kTiles, kRing>*>(memory);
  let_others_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = static_cast<int>(blockIdx.x) % a.kv_heads;
  Stream<kRing> stream(a, head, shared.units[warp], shared.ring[warp]);
  if (a.norm != nullptr) {
    *reinterpret_cast<uint2*>(&shared.norm[threadIdx.x * 4]) =
        __ldg(reinterpret_cast<const uint2*>(a.norm) + threadIdx.x);
  }
  // Of ldmatrix: where in a share a lane's row begins, for each of four neighbours in depth or columns.
  uint32_t key_at[4], value_at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    key_at[i] = lane % 16 * 512 + (((2 * i + lane / 16) ^ (lane & 7)) * 16);
    value_at[i] = (lane / 16 * 8 + lane % 8) * 256 + (((2 * i + lane / 8 % 2) ^ (lane & 7)) * 16);
  }
  const uint32_t query_at = shared_address(&shared.last.q[lane % 8][warp / 2 * (kAttendDim / 2) + lane / 8 * 8]);
  const Unit* unit = nullptr;
  int of = -1;                // whose queries there are
  unsigned key = 0, end = 0;  // first of the tile, and behind the last of the unit
  unsigned chunk_end;         // of the chunk that the tile is in
  bool first;                 // whether that is the first of a fold
  float scale;
  uint32_t q[kSteps / 2][4];  // of 8 queries
  Sums<kTiles> sums;
  Fold<kTiles> fold;

  // One place in the program for each push: what is not in the instruction cache costs more than it takes.
#pragma unroll 1
  for (int tile = -(kRing + 1) / 2, number = 0;; ++tile, key += kAttendKeys) {
    float (*const scores)[8 * kTiles][kAttendKeys + 8] = shared.scores[tile & 1];
    if (tile >= 0) {
      if (key >= end || tile == 0) {
        unit = &shared.units[warp][number++ % units_ahead(kRing)];
        if (unit->b < 0) {
          if (tile == 0) {
            wait_for_others();  // who ends before those in front would let the next kernel run too soon
          }
          return;
        }
        if (unit->b != of) {
          of = unit->b;
          load_queries<kTiles>(a, of, head, tile == 0, shared);
          if constexpr (kTiles == 1) {
#pragma unroll
            for (int pair = 0; pair < kSteps / 2; ++pair) {
              load_matrices(q[pair], query_at + pair * 64);
            }
          }
          scale = a.sm_scale * (a.k_scale == nullptr ? 1.0f : a.k_scale[head * a.k_scale_stride]) * kLog2E;
        }
        key = unit->begin;
        end = unit->end;
        chunk_end = key + unit->chunk;
        first = true;
        sums.clear();
      }
      const uint32_t from = stream.pop();
      float s[kTiles][2][4] = {};
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t queries[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if constexpr (kTiles == 1) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              queries[t][k] = q[pair][k];
            }
          } else {
            load_matrices(queries[t], query_at + t * 8 * sizeof(shared.last.q[0]) + pair * 64);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t k[4];
          load_matrices(k, from + key_at[(2 * pair + i) % 4] + pair / 2 * 128);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply(s[t][i], k[0], k[1], k[2], k[3], queries[t][2 * i], queries[t][2 * i + 1]);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          scores[warp / 2][t * 8 + lane % 4 * 2 + k % 2][warp % 2 * 16 + k / 2 * 8 + lane / 4] =
              s[t][0][k] + s[t][1][k];
        }
      }
    }
    stream.push_values(a);
    if (tile >= 0) {
      __syncthreads();
      uint32_t p[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float s[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = lane % 4 * 2 + 8 * j;
          const float2 one = *reinterpret_cast<const float2*>(&scores[0][t * 8 + lane / 4][column]);
          const float2 two = *reinterpret_cast<const float2*>(&scores[1][t * 8 + lane / 4][column]);
          s[2 * j] = key + column < end ? (one.x + two.x) * scale : -INFINITY;
          s[2 * j + 1] = key + column + 1 < end ? (one.y + two.y) * scale : -INFINITY;
        }
        float top = fmaxf(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), fmaxf(fmaxf(s[4], s[5]), fmaxf(s[6], s[7])));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
        top = fmaxf(top, sums.top[t]);
        const float shrink = exp2_approx(sums.top[t] - top);
        sums.top[t] = top;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          s[j] = exp2_approx(s[j] - top);
        }
        sums.total[t] =
            __fmaf_rn(sums.total[t], shrink, ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[t][j] = pack(s[2 * j], s[2 * j + 1]);
        }
        if (__any_sync(kAll, shrink != 1.0f)) {
          const float2 factors = for_averages(shrink);
#pragma unroll
          for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              sums.y[t][slab][k] *= k % 2 == 0 ? factors.x : factors.y;
            }
          }
        }
      }
      const uint32_t from = stream.pop();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          uint32_t v[4];
          load_turned(v, from + value_at[slab % 4] + slab / 4 * 128 + step * 16 * 256);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply(sums.y[t][slab], v[0], v[1], v[2], v[3], p[t][2 * step], p[t][2 * step + 1]);
          }
        }
      }
      const bool last = key + kAttendKeys >= end;
      if (last || key + kAttendKeys == chunk_end) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          sums.total[t] += __shfl_xor_sync(kAll, sums.total[t], 1);
          sums.total[t] += __shfl_xor_sync(kAll, sums.total[t], 2);
        }
        if constexpr (kFolds) {
          fold_chunk(fold, sums, first, a.rows * a.group, shared);
          first = false;
          chunk_end += unit->chunk;
          sums.clear();
        }
      }
      if (last) {
        if constexpr (kFolds) {
          leave<kTiles>(a, head, *unit, fold.top, fold.total, [&](int t, int slab, int k) {
            return shared.last.folds[t * 8 + lane % 4 * 2 + k % 2][column_of(slab, k / 2)];
          });
        } else {
          leave<kTiles>(a, head, *unit, sums.top, sums.total,
                        [&](int t, int slab, int k) { return sums.y[t][slab][k]; });
        }
      }
    }
    stream.push_keys(a);
  }
}

constexpr int kRingOf4 = 3, kRingOf16 = 5;  // an SM has room for two blocks of 4 queries, or one of 16

template <int kTiles, int kRing>
int bytes_of(const Attend& a, bool folds_in_shared) {
  using Shared = AttendShared<kTiles, kRing>;
  const int queries = folds_in_shared ? a.rows * a.group : 0;
  return static_cast<int>(std::max(sizeof(Shared), offsetof(Shared, last) + offsetof(QueriesAndFolds<kTiles>, folds) +
                                                       queries * sizeof(QueriesAndFolds<kTiles>::folds[0])));
}

}  // namespace
}  // namespace mtp::cuda
