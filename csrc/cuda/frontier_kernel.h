// draft_attention over caches of 512 elements a key, for 17 to 64 queries of a KV head, which a tree's frontier has:
// the first kernel on Hopper, whose chunks or folds of chunks a merge follows, as attend_kernel.h is of fewer queries.
//
// Blocks live as long as the launch and share out the parts as there. Four warps of a block bring keys and values into
// shared memory, where the tensor cores read them as they lie: of a tile of 64 keys half of the columns at a time.
// Eight multiply: two warpgroups, of which each has all scores, and half of the block's columns of values. So neither
// waits for the other, and one multiplies while the other takes exponentials.
//
// A part is a chunk, or a fold of chunks, for which registers have to be found. Either two blocks share a unit: each
// reads all keys, which L2 then has, and half of the values' columns. Or there are 32 queries at most: these leave half
// of the 64 rows free, whose sums are the fold; products of finite values add nothing to them, and at the end of a
// chunk the warps that have it hand it to those.
#pragma once

#include "attend_queries.h"
#include "frontier_sums.h"

namespace mtp::cuda {
namespace {

// Keys and values of all of a block's units, into the ring: of each tile both halves of the keys' columns, and the
// block's of the values', by halves. A warp has sixteen keys of each tile; a lane knows the place of one of them, and
// asks for the table's entry of the next one before it waits. Those who multiply are told which unit follows by the
// time that they have the last tile of the one in front.
template <class F>
__device__ __forceinline__ void copy_tiles(const Attend& a, FrontierShared& shared) {
  constexpr int kEach = F::kKeys / F::kCopiers;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32 - F::kWarps, head = F::head(a);
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
  uint32_t slot = 0;
  bool seen;
  const auto look_ahead = [&] {
    const unsigned mine = key + warp * kEach + lane % kEach;
    seen = unit.b >= 0 && mine < unit.end;
    if (seen) {
      look_up(a, units.table(), mine, entry, slot);
    }
  };
  look_ahead();
  Turn turn;
  while (unit.b >= 0) {
    const uint32_t place = place_of(a, entry, slot), at = seen ? place : kNowhere;
    key += F::kKeys;
    if (key >= unit.end) {
      find();
      key = unit.begin;
    }
    look_ahead();
#pragma unroll 1
    for (int part = 0; part < 2 + F::kSlabs; ++part) {
      const bool is_key = part < 2;
      const int half = is_key || F::kColumnBlocks == 1 ? part % 2 : F::column_block();
      const auto* from = static_cast<const bf16*>(is_key ? a.k : a.v) + half * F::kHalf;
      from = opaque(from + head * (is_key ? a.k_stride_head : a.v_stride_head) + lane * 8);
      const uint32_t to = shared_address(shared.ring[turn.stage]) + warp * kEach * 128 + lane / 8 * F::kBlockBytes;
      wait_for_phase(shared_address(&shared.empty[turn.stage]), turn.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        copy_of_lane(to + i * 128 + ((lane ^ i) % 8) * 16, from, at, i);
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

// Scores of half of the columns, or those of the first half and these.
template <int kHalf>
__device__ __forceinline__ void multiply_keys(float (&s)[FrontierSizes::kScores], uint64_t queries, uint32_t stage) {
  constexpr int kStep = 32;  // bytes of 16 columns, of which a block has four
  const uint64_t keys = operand(stage, 16, 1024);
#pragma unroll
  for (int i = 0; i < FrontierSizes::kHalf / 16; ++i) {
    const int at = i / 4 * FrontierSizes::kBlockBytes + i % 4 * kStep;
    multiply_64x64(s, advance(queries, kHalf * 4 * FrontierSizes::kBlockBytes + at), advance(keys, at), kHalf + i > 0);
  }
}

template <class F>
__device__ __forceinline__ void multiply_tiles(const Attend& a, FrontierShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp / 4;
  const bool is_fold = F::kHandsOver && warp % 4 >= 2;  // whose rows are those of the warp two below
  const int head = F::head(a), pair = half * 2 + warp % 2;
  const uint64_t queries = operand(shared_address(shared.q), 16, 1024);
  const uint32_t ring = shared_address(shared.ring), full = shared_address(shared.full);
  const uint32_t empty = shared_address(shared.empty);
  const auto release = [&](int stage) {
    __syncwarp();  // a lane that waits for the stage would miss it if the next copies were there
    if (lane == 0) {
      arrive(empty + stage * 8);
    }
  };
  Turn turn;
  int of = -1;  // whose queries there are
  float scale = 0.0f;
  FrontierSums<F> sums;
  FrontierAverages<F> all;  // of a fold, where it has registers of its own
  F::sync_all();
#pragma unroll 1
  for (int number = 0;; ++number) {
    const Unit unit = shared.units[number % F::kUnitsAhead];
    if (unit.b < 0) {
      break;
    }
    if (unit.b != of) {
      load_rows<F>(a, unit.b, head, of < 0, shared);
      let_products_see();
      F::sync();
      of = unit.b;
      scale = a.sm_scale * (a.k_scale == nullptr ? 1.0f : a.k_scale[head * a.k_scale_stride]) * kLog2E;
    }
    sums.clear();
    Best best;
    if constexpr (F::kFolds && !F::kHandsOver) {
      all.clear();
    }
#pragma unroll 1
    for (unsigned begin = unit.begin, end; begin < unit.end; begin = end) {  // a chunk
      end = F::kFolds ? min(begin + unit.chunk, unit.end) : unit.end;
      int before = -1;  // where the values are that may still be read
#pragma unroll 1
      for (unsigned key = begin; key < end; key += F::kKeys) {
        float s[F::kScores];
        const Turn low = turn;
        wait_for_phase(full + low.stage * 8, low.parity);
        let_products_see();
        begin_products();
        multiply_keys<0>(s, queries, ring + low.stage * F::kStageBytes);
        turn.next();
        wait_for_phase(full + turn.stage * 8, turn.parity);
        let_products_see();
        multiply_keys<1>(s, queries, ring + turn.stage * F::kStageBytes);
        end_products();
        if (before >= 0) {
          wait_for_products<1>();
          release(before);
        }
        wait_for_products<0>();
        pin(s);
        sums.averages.pin_all();
        release(low.stage);
        release(turn.stage);
        turn.next();
        uint32_t p[F::kWeights];
        sums.weigh(s, scale, key, end, is_fold, p);
        Turn mine = turn, other = turn;  // stages of values
        turn.next();
        if constexpr (F::kColumnBlocks == 1) {
          (half == 0 ? other : mine) = turn;
          turn.next();
        }
        wait_for_phase(full + mine.stage * 8, mine.parity);
        let_products_see();
        const uint64_t values = operand(ring + mine.stage * F::kStageBytes, F::kBlockBytes, 1024);
        const int columns = F::kColumnBlocks == 1 ? 0 : half * 2 * F::kBlockBytes;
        begin_products();
#pragma unroll
        for (int step = 0; step < F::kKeys / 16; ++step) {
#pragma unroll
          for (int h = 0; h < F::kSlabs; ++h) {
            multiply_64x128(sums.averages.y[h], p[step * 4], p[step * 4 + 1], p[step * 4 + 2], p[step * 4 + 3],
                            advance(values, columns + h * 2 * F::kBlockBytes + step * 2048));
          }
        }
        end_products();
        before = mine.stage;
        if constexpr (F::kColumnBlocks == 1) {
          wait_for_phase(full + other.stage * 8, other.parity);
          release(other.stage);
        }
      }
      wait_for_products<0>();
      sums.averages.pin_all();
      release(before);
      sums.complete();
      if constexpr (F::kHandsOver) {
        sums.hand_over(shared, pair, is_fold, best);
      } else if constexpr (F::kFolds) {
        sums.fold_into(best, all);
      }
    }
    if constexpr (F::kHandsOver) {
      if (is_fold) {
        sums.averages.leave(a, unit, warp % 2 * 16, best);
      }
    } else if constexpr (F::kFolds) {
      all.leave(a, unit, warp % 4 * 16, best);
    } else {
      sums.averages.leave(a, unit, warp % 4 * 16, sums.best);
    }
  }
  if (of < 0) {
    wait_for_others();  // who ends before those in front would let the next kernel run too soon
  }
}

template <class F>
__global__ void __launch_bounds__(F::kAllThreads, 1) attend_frontier(const __grid_constant__ Attend a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<FrontierShared*>(memory);
  let_others_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < F::kStages; ++i) {
      init_barrier(shared_address(&shared.full[i]), 32 * F::kCopiers + 1);
      init_barrier(shared_address(&shared.empty[i]), F::kWarps);
    }
  }
  __syncthreads();
  if (threadIdx.x >= F::kThreads) {
    give_registers<72>();
    copy_tiles<F>(a, shared);
  } else {
    take_registers<216>();
    multiply_tiles<F>(a, shared);
  }
}

// `use` gets the kernel that serves a launch, its threads and its bytes of shared memory.
template <class Use>
auto with_frontier(const Attend& a, Use use) {
  const auto of = [&](auto frontier) {
    using F = decltype(frontier);
    return use(attend_frontier<F>, F::kAllThreads, static_cast<int>(sizeof(FrontierShared)));
  };
  const bool folds = a.chunks_a_part > 1;
  if (a.column_blocks == 1) {
    return folds ? of(Frontier<1, true>()) : of(Frontier<1, false>());
  }
  return folds ? of(Frontier<2, true>()) : of(Frontier<2, false>());
}

}  // namespace
}  // namespace mtp::cuda
