// Which keys a block of attend_kernel.h reads, and for whom.
#pragma once

#include "attend.h"
#include "chunks.h"
#include "device.h"

namespace mtp::cuda {
namespace {

constexpr int kAttendDepth = 256;  // columns of a key, a warp's
constexpr float kLog2E = 1.4426950408889634f;

constexpr uint32_t kNowhere = 0xffffffff;  // of a key that nobody sees, whose copy is zeros: no cache has one there

// How a block's warps share a tile. Of keys each has 16, and of their depth 256 columns; of values all keys, and some
// of the columns. kTiles: of 8 queries.
template <int dim, int warps, int queries>
struct Shape {
  static constexpr int kDim = dim, kWarps = warps, kTiles = (queries + 7) / 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kDepths = kDim / kAttendDepth;  // that share the depth of a key,
  static constexpr int kSixteens = kWarps / kDepths;   // and that share the keys
  static constexpr int kKeys = 16 * kSixteens;         // of a tile,
  static constexpr int kMultiple = kKeys;              // of which a chunk has whole ones
  static constexpr int kColumns = kDim / kWarps;       // of values, a warp's
  static constexpr int kSlabs = kColumns / 16;
  static constexpr int kQueries = 8 * kTiles;
  static constexpr int kColumnBlocks = 1;
  // Two blocks on an SM beside a segment's have so many registers a thread. Folds then lie where the queries were,
  // which are in registers: those would not hold both.
  static constexpr bool kBesideSegments = kDim == 256 || queries <= 4;
  static constexpr int kRegisters = kBesideSegments ? 176 : 255;
  static constexpr int kFoldsInShared = kBesideSegments && kDim == 512 ? queries : 0;

  static __device__ __forceinline__ void sync() { __syncthreads(); }
};

__device__ __forceinline__ int64_t load_index(const void* at, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(at)[i] : static_cast<const int32_t*>(at)[i];
}

// The table's entry of a key, of a request whose table begins there, and the key's slot in the page. It is asked for
// before it is needed.
__device__ __forceinline__ void look_up(const Attend& a, int64_t table, unsigned key, int64_t& entry, uint32_t& slot) {
  const unsigned index = key / static_cast<unsigned>(a.page_size);
  slot = key - index * a.page_size;
  entry = load_index(a.table, a.table_is_int64, table + index);
}

// Where that is in both caches, in units of 8 elements.
__device__ __forceinline__ uint32_t place_of(const Attend& a, int64_t entry, uint32_t slot) {
  const auto page = static_cast<uint32_t>(min(max(entry, int64_t{0}), static_cast<int64_t>(a.num_pages - 1)));
  return page * a.stride_page + slot * a.stride_slot;
}

// 16 bytes of the key whose place that lane knows.
__device__ __forceinline__ void copy_of_lane(uint32_t to, const bf16* from, uint32_t place, int lane) {
  const uint32_t at = __shfl_sync(kAll, place, lane);
  copy_16_bytes(to, from + static_cast<uint64_t>(at) * 8, at == kNowhere ? 0 : 16);
}

// A part of the keys of a request, for one KV head.
struct Unit {
  int b, part;  // b: -1 behind the last unit of a block
  int chunk;    // keys of one
  unsigned begin, end;
};

// What a request's queries see.
struct Visible {
  int64_t table;  // its first entry
  int first;      // key
  int keys;
  int chunk;  // keys of one
  int parts;
};

template <class S>
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
  found.chunk = keys_of_chunk(found.keys, a.chunk_weight, a.log2_max_chunks, S::kMultiple);
  found.parts = min(how_many(how_many(found.keys, found.chunk), a.chunks_a_part), a.parts);
  return found;
}

// The units of a block, in their order.
template <class S>
class Units {
 public:
  __device__ explicit Units(const Attend& a) {
    int total = 0;
#pragma unroll 1
    for (int first = (a.batch - 1) / 32 * 32; first >= 0; first -= 32) {
      upto_ = count(a, first);
      total += __shfl_sync(kAll, upto_, 31);
    }
    const int blocks = a.kv_heads * S::kColumnBlocks;  // that have the same units
    const int groups = static_cast<int>(gridDim.x) / blocks, group = static_cast<int>(blockIdx.x) / blocks;
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
      const Visible seen = visible_of<S>(a, b_);
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
    int upto = first + lane < a.batch ? visible_of<S>(a, first + lane).parts : 0;
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

}  // namespace
}  // namespace mtp::cuda
