// The keys and values of a block of attend_kernel.h on their way into shared memory.
#pragma once

#include "attend_units.h"

namespace mtp::cuda {
namespace {

constexpr int kShareBytes = 8192;  // of a tile's K or V, a warp's: 16 keys x 256 columns, or 32 x 128, or 64 x 64

constexpr int kRing = 3;        // shares of K and V that a warp has on the way, in turn
constexpr int kUnitsAhead = 4;  // that a warp has to know: it asks for keys of the last while it reads the first's
static_assert(kRing % 2 == 1, "values are pushed when keys have been read");

// A warp's shares of the block's tiles on their way: K of a tile, its V, K of the next one. Nothing is before the first
// tile but a share of values that are not there, behind which the first unit is looked for.
template <class S>
class Stream {
 public:
  __device__ Stream(const Attend& a, int head, Unit* found, const void* ring)
      : units_(a), found_(found), head_(head), base_(shared_address(ring)) {}

  __device__ __forceinline__ void push_keys(const Attend& a) {
    __syncwarp();
    if (more_) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        const uint32_t place = place_of(a, entry_[j], in_page_[j]);
        at_[j] = key_ + j * 32 + lane < end_ ? place : kNowhere;
      }
      const auto* from = static_cast<const bf16*>(a.k) + head_ * a.k_stride_head;
      from = opaque(from + warp / S::kSixteens * kAttendDepth + lane * 8);
      const int first = warp % S::kSixteens * 16;
      const uint32_t at = first < 32 ? at_[0] : at_[kLines - 1];
      const uint32_t to = base_ + slot_ + lane * 16;
#pragma unroll 8
      for (int i = 0; i < 16; ++i) {
        copy_of_lane((to ^ (i & 7) * 16) + i * 512, from, at, first % 32 + i);
      }
    }
    end_push();
  }

  __device__ __forceinline__ void push_values(const Attend& a) {
    __syncwarp();
    if (more_) {
      constexpr int kLanes = S::kColumns / 8, kRowsAtOnce = 32 / kLanes;
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / kLanes, column = lane % kLanes;
      const auto* from = static_cast<const bf16*>(a.v) + head_ * a.v_stride_head;
      from = opaque(from + warp * S::kColumns + column * 8);
      const uint32_t to = base_ + slot_ + row * S::kColumns * 2 + (column ^ row) * 16;
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
#pragma unroll 8
        for (int i = 0; i < 32 / kRowsAtOnce; ++i) {
          const int above = kRowsAtOnce * i;
          copy_of_lane((to ^ (above & 7) * 16) + (j * 32 + above) * S::kColumns * 2, from, at_[j], above + row);
        }
      }
      key_ += S::kKeys;
    }
    if (key_ >= end_ && !ended_) {
      const Unit unit = units_.find(a);
      more_ = unit.b >= 0;
      ended_ = !more_;
      key_ = unit.begin;
      end_ = unit.end;
      if (threadIdx.x % 32 == 0) {
        found_[count_ % kUnitsAhead] = unit;
      }
      ++count_;
    }
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
      const unsigned mine = key_ + j * 32 + threadIdx.x % 32;
      if (mine < end_) {
        look_up(a, units_.table(), mine, entry_[j], in_page_[j]);
      }
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
  static constexpr int kLines = S::kKeys / 32;  // keys of a tile that a lane knows the places of

  __device__ __forceinline__ void end_push() {
    commit_copies();
    slot_ = slot_ + kShareBytes == kRing * kShareBytes ? 0 : slot_ + kShareBytes;
  }

  Units<S> units_;
  Unit* const found_;  // in shared memory, in turn
  const int head_;
  uint32_t base_, slot_ = (kRing - 1) * kShareBytes;
  int count_ = 0;
  bool more_ = false, ended_ = false;
  unsigned key_ = 0, end_ = 0;  // of the unit that is asked for
  int64_t entry_[kLines] = {};  // of the table, for a lane's keys of the next tile
  uint32_t in_page_[kLines] = {};
  uint32_t at_[kLines] = {};  // of a lane's keys of the tile, in both caches, in units of 8 elements
};

}  // namespace
}  // namespace mtp::cuda
