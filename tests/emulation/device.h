// Stands in for csrc/cuda/device.h where a kernel's source runs on a CPU: threads of a block are coroutines, which stop
// at every barrier and at every instruction of a warp. Shared memory begins as NaN, and an asynchronous copy arrives as
// late as it may: when it is waited for.
#pragma once

#include <setjmp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __maxnreg__(...)
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using std::isinf;
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

namespace emulated {

constexpr int kMostThreads = 384, kShared = 232448;  // of a block
struct Index {
  int x = 0, y = 0;
};

// A number of threads that wait for each other, again and again.
struct Barrier {
  int members, arrived = 0;
  uint32_t turn = 0;
};

struct Warp {
  Barrier barrier{32};
  uint64_t values[2][32][4];  // of one instruction and the next
};

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;  // what is not seen is not touched
};

inline Index thread, block, grid;
inline unsigned char* shared = nullptr;
inline Warp warps[kMostThreads / 32];
inline Barrier all{0};                                       // the threads of the launch
inline std::vector<std::vector<Copy>> copies[kMostThreads];  // groups, the last of which is open
inline jmp_buf scheduler, stopped[kMostThreads];

inline void carry_out(const Copy& copy) {
  std::memset(shared + copy.to, 0, 16);
  if (copy.bytes > 0) {
    std::memcpy(shared + copy.to, copy.from, copy.bytes);
  }
}

// Not swapcontext, which asks the kernel for the signals each time.
[[gnu::noinline]] inline void stop() {
  if (_setjmp(stopped[thread.x]) == 0) {
    _longjmp(scheduler, 1);
  }
}

// What a thread waits for: that the word is another one.
struct Wait {
  const uint32_t* word = nullptr;
  uint32_t value = 0;

  bool goes_on() const { return word != nullptr && *word == value; }
};
inline Wait waits[kMostThreads];

inline void wait_while(const uint32_t& word, uint32_t value) {
  waits[thread.x] = {&word, value};
  while (waits[thread.x].goes_on()) {
    stop();
  }
  waits[thread.x] = {};
}

inline void wait(Barrier& barrier) {
  const uint32_t turn = barrier.turn;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
  wait_while(barrier.turn, turn);
}

inline Warp& warp() { return warps[thread.x / 32]; }

using Values = uint64_t (&)[32][4];  // of each lane

inline void hand_over(Values) {}

// An instruction of a warp: takes a lane's values, and returns where all lie once they are there. The lane that comes
// last does what is done for all: `for_all` gets the values and leaves results there.
[[gnu::noinline]] inline Values instruction(void (*for_all)(Values), uint64_t one, uint64_t two = 0,
                                            uint64_t three = 0) {
  Barrier& barrier = warp().barrier;
  Values values = warp().values[barrier.turn & 1];
  uint64_t* mine = values[thread.x % 32];
  mine[0] = one;
  mine[1] = two;
  mine[2] = three;
  if (barrier.arrived + 1 == barrier.members) {
    for_all(values);
  }
  wait(barrier);
  return values;
}

inline Values exchange(uint64_t one) { return instruction(hand_over, one); }

template <class T>
T from_lane(T value, int lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(bits)[lane & 31][0];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float bf16_of(uint64_t word, int place) {
  const auto bits = static_cast<uint32_t>(word >> (16 * place)) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block
#define gridDim emulated::grid

template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  return emulated::from_lane(value, lane);
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return emulated::from_lane(value, (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int by) {
  const int lane = threadIdx.x % 32;
  return emulated::from_lane(value, lane >= by ? lane - by : lane);
}
inline uint32_t __ballot_sync(uint32_t, bool is) {
  const auto& values = emulated::exchange(is ? 1 : 0);
  uint32_t found = 0;
  for (int lane = 0; lane < 32; ++lane) {
    found |= static_cast<uint32_t>(values[lane][0]) << lane;
  }
  return found;
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const auto& values = emulated::exchange(value);
  for (int lane = 0; lane < 32; ++lane) {
    value = std::min(value, static_cast<uint32_t>(values[lane][0]));
  }
  return value;
}
inline bool __any_sync(uint32_t members, bool is) { return __ballot_sync(members, is) != 0; }
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline void __syncwarp() { emulated::wait(emulated::warp().barrier); }
inline void __syncthreads() { emulated::wait(emulated::all); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

#include "lanes.h"

namespace mtp::cuda {

struct bf16 {
  uint16_t bits;
};
inline uint32_t rounded_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack(float one, float two) { return rounded_bits(one) | rounded_bits(two) << 16; }

template <class T>
T load_fresh(const T* at) {
  return *at;
}
inline uint4 load_once(const void* at) { return *static_cast<const uint4*>(at); }
inline void let_others_start() {}
inline void wait_for_others() {}
inline float exp2_approx(float x) { return std::exp2(x); }
inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(at) - emulated::shared);
}
template <class T>
const T* opaque(const T* x) {
  return x;
}
inline int lane_anew() { return threadIdx.x % 32; }
inline void copy_16_bytes(uint32_t to, const void* from, int bytes) {
  emulated::copies[threadIdx.x].back().push_back({to, from, bytes});
}
inline void store_for_next(float* at, float x) { *at = x; }
inline void store_for_next(float* at, float2 x) { at[0] = x.x, at[1] = x.y; }
inline void commit_copies() { emulated::copies[threadIdx.x].emplace_back(); }
template <int kPending>
void wait_for_copies() {
  auto& groups = emulated::copies[threadIdx.x];
  while (static_cast<int>(groups.size()) - 1 > kPending) {
    for (const auto& copy : groups.front()) {
      emulated::carry_out(copy);
    }
    groups.erase(groups.begin());
  }
}

// ldmatrix: four matrices of 8 rows, whose places lanes have.
template <bool kTurned>
[[gnu::noinline]] void load_for_all(emulated::Values values) {
  const unsigned char* rows[32];
  for (int lane = 0; lane < 32; ++lane) {
    rows[lane] = emulated::shared + values[lane][0];
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        const int row = kTurned ? lane % 4 * 2 + i : lane / 4, column = kTurned ? lane / 4 : lane % 4 * 2 + i;
        std::memcpy(&pair[i], rows[matrix * 8 + row] + column * 2, 2);
      }
      values[lane][matrix] = static_cast<uint32_t>(pair[1]) << 16 | pair[0];
    }
  }
}
inline void load_matrices(uint32_t (&a)[4], uint32_t at) {
  std::copy_n(emulated::instruction(load_for_all<false>, at)[threadIdx.x % 32], 4, a);
}
inline void load_turned(uint32_t (&a)[4], uint32_t at) {
  std::copy_n(emulated::instruction(load_for_all<true>, at)[threadIdx.x % 32], 4, a);
}

// mma.m16n8k16, its operands dealt to lanes as PTX says.
[[gnu::noinline]] inline void multiply_for_all(emulated::Values values) {
  float a[16][16], b[16][8], sums[16][8] = {};  // by row and k; by k and column; by row and column
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int k = lane % 4 * 2 + i % 2 + i / 2 * 8;
      a[lane / 4][k] = emulated::bf16_of(values[lane][i / 2], i % 2);
      a[lane / 4 + 8][k] = emulated::bf16_of(values[lane][i / 2], 2 + i % 2);
      b[k][lane / 4] = emulated::bf16_of(values[lane][2], i);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) {
        sums[row][column] += a[row][k] * b[k][column];
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int c = 0; c < 4; ++c) {
      values[lane][c] = __float_as_uint(sums[lane / 4 + c / 2 * 8][lane % 4 * 2 + c % 2]);
    }
  }
}
inline void multiply(float (&y)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const auto pair = [](uint32_t one, uint32_t two) { return static_cast<uint64_t>(two) << 32 | one; };
  const auto& sums = emulated::instruction(multiply_for_all, pair(a0, a1), pair(a2, a3), pair(b0, b1));
  for (int c = 0; c < 4; ++c) {
    y[c] += __uint_as_float(static_cast<uint32_t>(sums[threadIdx.x % 32][c]));
  }
}

}  // namespace mtp::cuda
