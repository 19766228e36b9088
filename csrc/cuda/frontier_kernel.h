// draft_attention over caches of 512 elements a key, for 17 to 64 queries of a KV head, which a tree's frontier has: the
// first kernel on Hopper, whose chunks a merge follows, as attend_kernel.h is of fewer queries.
//
// Blocks live as long as the launch and share out the chunks as there. Four warps of a block bring keys and values into
// shared memory, in tiles of 32 keys, where the tensor cores read them as they lie; eight multiply: two warpgroups, of
// which each has all scores, and half of the values' columns. So neither waits for the other, and one multiplies while
// the other takes exponentials.
//
// A part is a chunk, or of 32 queries at most a fold of chunks: these leave half of the 64 rows free, whose sums are the
// fold. The products add nothing to them, and at the end of a chunk the warps that have it hand it to those.
#pragma once

#include "attend_queries.h"
#include "attend_sums.h"
#include "warpgroup.h"

namespace mtp::cuda {
namespace {

struct Frontier {
  static constexpr int kDim = 512, kQueries = 64, kKeys = 32;  // of a tile
  static constexpr int kMultiple = 128;                        // a chunk has a multiple of so many keys
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;     // that multiply
  static constexpr int kCopiers = 4, kAllThreads = kThreads + 32 * kCopiers;
  static constexpr int kTileBytes = kKeys * kDim * 2, kStages = 5;
  static constexpr int kUnitsAhead = 8;  // which are found: one for each tile of the ring, that in front and the next
  static constexpr int kBlockBytes = kKeys * 128, kQueryBlockBytes = kQueries * 128;  // of 64 columns

  static __device__ __forceinline__ void sync() { sync_some<kThreads>(1); }
  // The two warps that hand each other a chunk.
  static __device__ __forceinline__ void sync_pair(int pair) { sync_some<64>(3 + pair); }
  static __device__ __forceinline__ void sync_all() { sync_some<kAllThreads>(2); }
};

struct FrontierShared {
  alignas(1024) unsigned char ring[Frontier::kStages][Frontier::kTileBytes];
  unsigned char q[Frontier::kQueries * Frontier::kDim * 2];
  uint64_t full[Frontier::kStages], empty[Frontier::kStages];
  Unit units[Frontier::kUnitsAhead];
  float4 handed[4][32];  // maxima and sums of a lane's queries

  // A lane's averages number i, i + 1, ... of 16 times four, which lie where the upper half of the queries would.
  __device__ __forceinline__ float4* averages(int pair, int i, int lane) {
    unsigned char* at = q + (pair * 2 + i / 8) * Frontier::kQueryBlockBytes + Frontier::kQueryBlockBytes / 2;
    return reinterpret_cast<float4*>(at) + i % 8 * 32 + lane;
  }

  // Eight columns of a query.
  __device__ __forceinline__ bf16* query(int query, int column) {
    const int at = column / 64 * Frontier::kQueryBlockBytes + query * 128 + ((column / 8 ^ query) % 8) * 16;
    return reinterpret_cast<bf16*>(q + at);
  }
};

// Which tile of the ring is next, and in which turn.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == Frontier::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Keys and values of all of a block's units, into the ring. A warp has eight keys of each tile; a lane knows the place
// of one of them, and asks for the table's entry of the next one before it waits. Those who multiply are told which unit
// follows by the time that they have the last tile of the one in front.
__device__ __forceinline__ void copy_tiles(const Attend& a, int head, FrontierShared& shared) {
  using F = Frontier;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32 - F::kWarps;
  Units<F> units(a);
  Unit unit;
  int count = 0;
  const auto find = [&] {
    unit = units.find(a);
    if (warp == 0 && lane == 0) {
      shared.units[count % F::kUnitsAhead] = unit;
    }
    ++count;
  };
  find();
  F::sync_all();
  unsigned key = unit.begin;
  int64_t entry = 0;
  uint32_t in_page = 0;
  bool seen;
  const auto look_up = [&] {
    const unsigned mine = key + warp * 8 + lane % 8;
    seen = unit.b >= 0 && mine < unit.end;
    if (seen) {
      const unsigned index = mine / static_cast<unsigned>(a.page_size);
      in_page = mine - index * a.page_size;
      entry = load_index(a.table, a.table_is_int64, units.table() + index);
    }
  };
  look_up();
  Turn turn;
  while (unit.b >= 0) {
    const auto page = static_cast<uint32_t>(min(max(entry, int64_t{0}), static_cast<int64_t>(a.num_pages - 1)));
    const uint32_t at = seen ? page * a.stride_page + in_page * a.stride_slot : kNowhere;
    key += F::kKeys;
    if (key >= unit.end) {
      find();
      key = unit.begin;
    }
    look_up();
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const auto* from = static_cast<const bf16*>(which == 0 ? a.k : a.v);
      from = opaque(from + head * (which == 0 ? a.k_stride_head : a.v_stride_head) + lane * 8);
      const uint32_t to = shared_address(shared.ring[turn.stage]) + warp * 1024 + lane / 8 * F::kBlockBytes;
      wait_for_phase(shared_address(&shared.empty[turn.stage]), turn.parity ^ 1);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t place = __shfl_sync(kAll, at, i);
        const int bytes = place == kNowhere ? 0 : 16;
        const bf16* row = from + static_cast<uint64_t>(place) * 8;
        const uint32_t there = to + i * 128 + (lane % 8 ^ i) * 16;
        copy_16_bytes(there, row, bytes);
        copy_16_bytes(there + 4 * F::kBlockBytes, row + 256, bytes);
      }
      arrive_with_copies(shared_address(&shared.full[turn.stage]));
      if (warp == 0 && lane == 0) {
        arrive(shared_address(&shared.full[turn.stage]));  // with the unit that it has told
      }
      turn.next();
    }
  }
  commit_copies();
  wait_for_copies<0>();
}

// The queries of a request and a KV head, as load_queries has them. Few rows are shared by several warps, so that no
// warp waits for another. `waits` for the kernels in front.
__device__ __forceinline__ void load_frontier(const Attend& a, int b, int head, bool waits, FrontierShared& shared) {
  using F = Frontier;
  constexpr int kCount = F::kDim / 64, kEach = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sharing = a.rows > 4 ? 1 : a.rows > 2 ? 2 : F::kWarps / a.rows;  // warps a row
  Elements<kCount> norm[2] = {};
  load_norm(a, norm);
  F::sync();  // what was there before is read until here
#pragma unroll 1
  for (int row = warp / sharing; row < a.rows; row += F::kWarps / sharing) {
    float2 turns[kCount];
#pragma unroll 1
    for (int first = warp % sharing; first < a.group; first += sharing * kEach) {
      Elements<kCount> found[kEach][2];
      const auto load = [&] {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int member = first + j * sharing;
          if (member < a.group) {
            const auto* from = static_cast<const bf16*>(a.q) + b * a.q_stride_batch + row * a.q_stride_row +
                               (head * a.group + member) * a.q_stride_head + lane * kCount;
            found[j][0].load(from);
            found[j][1].load(from + F::kDim / 2);
          }
        }
      };
      if (!waits) {
        load();
      }
      if (a.freq != nullptr && first < sharing) {
        const auto position = static_cast<float>(
            load_index(a.positions, a.positions_are_int64, b * a.position_stride_batch + row * a.position_stride));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int pair = lane * kCount + i;
          turns[i] = pair < a.num_pairs ? sine_and_cosine(position * a.freq[pair]) : make_float2(0.0f, 1.0f);
        }
      }
      if (waits) {
        wait_for_others();
        load();
        waits = false;
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int member = first + j * sharing;
        if (member >= a.group) {
          break;
        }
        leave_query<F>(a, found[j], norm, [&](int i) { return turns[i]; }, row * a.group + member, shared);
      }
    }
  }
  if (waits) {
    wait_for_others();
  }
  leave_no_queries<F, kCount>(a.rows * a.group, shared);
  let_products_see();
  F::sync();
}

// Of a fold: maxima and sums of the queries whose averages a lane has.
struct Best {
  float top[2], total[2];
};

// Of a chunk: maxima of the queries lane / 4 of the warp's 16 and of that 8 below, sums of a lane's own keys alone, and
// averages of half of the columns, not divided by them.
struct FrontierSums {
  float top[2], total[2];
  float y[2][64];  // of 128 columns each

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = -INFINITY;
      total[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < 64; ++j) {
        y[i][j] = 0.0f;
      }
    }
  }

  // Scores become weights, in pairs: of a tile whose first key is `key`, of which those before `end` are seen. The rows of
  // a fold have none.
  __device__ __forceinline__ void weigh(float (&s)[16], float scale, unsigned key, unsigned end, bool is_fold,
                                        uint32_t (&p)[8]) {
    const int lane = threadIdx.x % 32;
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float best = top[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& x = s[j * 4 + i * 2 + k];
          x = key + j * 8 + lane % 4 * 2 + k < end ? x * scale : -INFINITY;
          best = fmaxf(best, x);
        }
      }
      best = fmaxf(best, __shfl_xor_sync(kAll, best, 1));
      best = fmaxf(best, __shfl_xor_sync(kAll, best, 2));
      shrink[i] = is_fold ? 1.0f : exp2_approx(top[i] - best);
      top[i] = best;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float one = exp2_approx(s[j * 4 + i * 2] - best), two = exp2_approx(s[j * 4 + i * 2 + 1] - best);
        sum += one + two;
        p[j * 2 + i] = is_fold ? 0 : pack(one, two);
      }
      total[i] = __fmaf_rn(total[i], shrink[i], sum);
    }
    if (__any_sync(kAll, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 64; ++j) {
          y[h][j] *= shrink[j / 2 % 2];
        }
      }
    }
  }

  __device__ __forceinline__ void complete() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total[i] += __shfl_xor_sync(kAll, total[i], 1);
      total[i] += __shfl_xor_sync(kAll, total[i], 2);
    }
  }

  // A chunk, complete, from one warp of a pair to the one that has the fold, into which it goes by the arithmetic of the
  // merge; nothing is left of it. Both warps take the same way, as those who wait for products have to.
  __device__ __forceinline__ void hand_over(FrontierShared& shared, int pair, bool is_fold, Best& best) {
    const int lane = threadIdx.x % 32;
    float shrink[2], new_shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Frontier::sync_pair(pair);  // what was there is read
      if (!is_fold) {
        if (h == 0) {
          shared.handed[pair][lane] = {top[0], top[1], total[0], total[1]};
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          *shared.averages(pair, i, lane) = {y[h][i * 4], y[h][i * 4 + 1], y[h][i * 4 + 2], y[h][i * 4 + 3]};
        }
      }
      Frontier::sync_pair(pair);
      if (h == 0) {
        const float4 handed = shared.handed[pair][lane];
        const float new_top[2] = {handed.x, handed.y}, new_total[2] = {handed.z, handed.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float now = fmaxf(best.top[i], new_top[i]);
          const float base = now == -INFINITY ? 0.0f : now;
          shrink[i] = exp2_approx(best.top[i] - base);
          new_shrink[i] = exp2_approx(new_top[i] - base);
          best.total[i] = __fmaf_rn(best.total[i], shrink[i], __fmul_rn(new_total[i], new_shrink[i]));
          best.top[i] = now;
          top[i] = -INFINITY;
          total[i] = 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i % 4 == 0) {
          pin(y[h]);  // no more loads at a time than there are registers for
        }
        const float4 found = *shared.averages(pair, i, lane);
        const float more[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float& at = y[h][i * 4 + k];
          const float sum = __fmaf_rn(at, shrink[k / 2], __fmul_rn(more[k], new_shrink[k / 2]));
          at = is_fold ? sum : 0.0f;
        }
      }
    }
  }

  // To where the merge finds it, of queries from `first` on.
  __device__ __forceinline__ void leave(const Attend& a, int head, const Unit& unit, int first, const Best& best) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = first + i * 8 + lane / 4;
      if (query < a.rows * a.group) {
        const int64_t line = line_of(a, head, unit, query);
        if (warp / 4 == 0 && lane % 4 == 0) {
          *reinterpret_cast<float2*>(a.stats + line * 2) = make_float2(best.top[i], best.total[i]);
        }
        float* at = a.partial + line * Frontier::kDim + warp / 4 * 256 + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            store_for_next(at + h * 128 + j * 8, make_float2(y[h][j * 4 + i * 2], y[h][j * 4 + i * 2 + 1]));
          }
        }
      }
    }
  }
};

template <bool kFolds>
__device__ __forceinline__ void multiply_tiles(const Attend& a, int head, FrontierShared& shared) {
  using F = Frontier;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4;
  const bool is_fold = kFolds && warp % 4 >= 2;  // whose rows are those of the warp two below
  const int pair = half * 2 + warp % 2;
  const uint64_t queries = operand(shared_address(shared.q), 16, 1024);
  const uint32_t ring = shared_address(shared.ring), full = shared_address(shared.full);
  const uint32_t empty = shared_address(shared.empty);
  const auto release = [&](int stage) {
    if (lane == 0) {
      arrive(empty + stage * 8);
    }
  };
  Turn turn;
  int of = -1;  // whose queries there are
  float scale = 0.0f;
  FrontierSums sums;
  F::sync_all();
#pragma unroll 1
  for (int number = 0;; ++number) {
    const Unit unit = shared.units[number % F::kUnitsAhead];
    if (unit.b < 0) {
      break;
    }
    if (unit.b != of) {
      load_frontier(a, unit.b, head, of < 0, shared);
      of = unit.b;
      scale = a.sm_scale * (a.k_scale == nullptr ? 1.0f : a.k_scale[head * a.k_scale_stride]) * kLog2E;
    }
    sums.clear();
    Best best = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll 1
    for (unsigned begin = unit.begin, end; begin < unit.end; begin = end) {  // a chunk
      end = kFolds ? min(begin + unit.chunk, unit.end) : unit.end;
      int before = -1;  // where the values are that may still be read
#pragma unroll 1
      for (unsigned key = begin; key < end; key += F::kKeys) {
        float s[16];
        wait_for_phase(full + turn.stage * 8, turn.parity);
        let_products_see();
        const uint64_t keys = operand(ring + turn.stage * F::kTileBytes, 16, 1024);
        begin_products();
#pragma unroll
        for (int step = 0; step < F::kDim / 16; ++step) {
          multiply_64x32(s, advance(queries, step / 4 * F::kQueryBlockBytes + step % 4 * 32),
                         advance(keys, step / 4 * F::kBlockBytes + step % 4 * 32), step > 0);
        }
        end_products();
        if (before >= 0) {
          wait_for_products<1>();
          release(before);
        }
        wait_for_products<0>();
        pin(s);
        pin(sums.y[0]);
        pin(sums.y[1]);
        release(turn.stage);
        turn.next();
        uint32_t p[8];
        sums.weigh(s, scale, key, end, is_fold, p);
        wait_for_phase(full + turn.stage * 8, turn.parity);
        let_products_see();
        const uint64_t values =
            operand(ring + turn.stage * F::kTileBytes + half * 4 * F::kBlockBytes, F::kBlockBytes, 1024);
        begin_products();
#pragma unroll
        for (int step = 0; step < F::kKeys / 16; ++step) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            multiply_64x128(sums.y[h], p[step * 4], p[step * 4 + 1], p[step * 4 + 2], p[step * 4 + 3],
                            advance(values, h * 2 * F::kBlockBytes + step * 2048));
          }
        }
        end_products();
        before = turn.stage;
        turn.next();
      }
      wait_for_products<0>();
      pin(sums.y[0]);
      pin(sums.y[1]);
      release(before);
      sums.complete();
      if constexpr (kFolds) {
        sums.hand_over(shared, pair, is_fold, best);
      }
    }
    if constexpr (kFolds) {
      if (is_fold) {
        sums.leave(a, head, unit, warp % 2 * 16, best);
      }
    } else {
      sums.leave(a, head, unit, warp % 4 * 16, {{sums.top[0], sums.top[1]}, {sums.total[0], sums.total[1]}});
    }
  }
  if (of < 0) {
    wait_for_others();  // who ends before those in front would let the next kernel run too soon
  }
}

template <bool kFolds>
__global__ void __launch_bounds__(Frontier::kAllThreads, 1) attend_frontier(const __grid_constant__ Attend a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<FrontierShared*>(memory);
  let_others_start();
  const int head = static_cast<int>(blockIdx.x) % a.kv_heads;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Frontier::kStages; ++i) {
      init_barrier(shared_address(&shared.full[i]), 32 * Frontier::kCopiers + 1);
      init_barrier(shared_address(&shared.empty[i]), Frontier::kWarps);
    }
  }
  __syncthreads();
  if (threadIdx.x >= Frontier::kThreads) {
    give_registers<56>();
    copy_tiles(a, head, shared);
  } else {
    take_registers<224>();
    multiply_tiles<kFolds>(a, head, shared);
  }
}

}  // namespace
}  // namespace mtp::cuda
