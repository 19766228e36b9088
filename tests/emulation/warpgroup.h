// Stands in for csrc/cuda/warpgroup.h beside device.h: barriers in shared memory, whose copies are there for him who
// has waited for them, and products of a warpgroup. Every other block makes them at once, where what they read has to
// be there; the rest as late as may be, when they are waited for and all other threads have had their time, so that
// what they read has to be there still.
#pragma once

#include <map>

#include "device.h"

namespace emulated {

struct Phases {
  int arrivals, arrived = 0;
  uint32_t parity = 0;
  std::vector<Copy> copies, landed;  // of the phase that goes on, and of those that have ended
};

// y of 64 rows, a lane's values of each thread; a from registers where `a_words` says so.
struct Product {
  float* y[128];
  uint32_t a_words[128][4];
  uint64_t a, b;
  int columns;
  bool add, from_registers;
};

struct Warpgroup {
  Barrier barrier{128};
  Product made;
  std::vector<std::vector<Product>> groups{1};
};

inline std::map<uint32_t, Phases> phases;  // by the place of a barrier
inline Warpgroup warpgroups[kMostThreads / 128];
inline std::map<int, Barrier> some;  // by number

inline Warpgroup& warpgroup() { return warpgroups[thread.x / 128]; }

inline float element(uint32_t at) {
  uint16_t bits;
  std::memcpy(&bits, shared + (at ^ (at / 128 % 8 * 16)), 2);
  return bf16_of(bits, 0);
}

// Of an operand of rows and depth: where a row is 128 bytes of its depth, or where it is a column.
inline float in_depth(uint64_t operand, int row, int k) {
  const auto at = static_cast<uint32_t>(operand & 0x3fff) * 16,
             stride = static_cast<uint32_t>(operand >> 32 & 0x3fff) * 16;
  return element(at + row / 8 * stride + row % 8 * 128 + k * 2);
}

inline float in_columns(uint64_t operand, int k, int column) {
  const auto at = static_cast<uint32_t>(operand & 0x3fff) * 16,
             stride = static_cast<uint32_t>(operand >> 32 & 0x3fff) * 16;
  const auto leading = static_cast<uint32_t>(operand >> 16 & 0x3fff) * 16;
  return element(at + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2);
}

inline void make(Product& p) {
  static float a[64][16], b[16][256];
  for (int k = 0; k < 16; ++k) {
    for (int column = 0; column < p.columns; ++column) {
      b[k][column] = p.from_registers ? in_columns(p.b, k, column) : in_depth(p.b, column, k);
    }
  }
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      const int thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
      a[row][k] =
          p.from_registers ? bf16_of(p.a_words[thread][k / 8 * 2 + row % 16 / 8], k % 2) : in_depth(p.a, row, k);
    }
  }
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < p.columns; ++column) {
      float& y = p.y[row / 16 * 32 + row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
      double sum = p.add ? y : 0.0;
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(a[row][k]) * b[k][column];
      }
      y = static_cast<float>(sum);
    }
  }
}

constexpr int kPatience = 64;  // turns of the other threads: enough for copies into a stage that is free

inline bool is_hasty() { return block.x % 2 == 1; }

// Once all threads of the warpgroup are there, the last of them does `what`.
template <class What>
void together(What what) {
  Warpgroup& mine = warpgroup();
  if (mine.barrier.arrived + 1 == mine.barrier.members) {
    what(mine);
  }
  wait(mine.barrier);
}

// The product whose y, and a where it comes from registers, all threads have told.
inline void issue(uint64_t a, uint64_t b, int columns, bool add, bool from_registers) {
  together([=](Warpgroup& mine) {
    mine.made.a = a, mine.made.b = b, mine.made.columns = columns, mine.made.add = add;
    mine.made.from_registers = from_registers;
    if (is_hasty()) {
      make(mine.made);
    } else {
      mine.groups.back().push_back(mine.made);
    }
  });
}

}  // namespace emulated

namespace mtp::cuda {

inline void init_barrier(uint32_t at, int arrivals) { emulated::phases[at] = {arrivals}; }

inline void arrive(uint32_t at) {
  auto& phase = emulated::phases.at(at);
  if (++phase.arrived == phase.arrivals) {
    phase.landed.insert(phase.landed.end(), phase.copies.begin(), phase.copies.end());
    phase.copies.clear();
    phase.arrived = 0;
    phase.parity ^= 1;
  }
}

inline void arrive_with_copies(uint32_t at) {
  auto& mine = emulated::copies[threadIdx.x].back();
  auto& all = emulated::phases.at(at).copies;
  all.insert(all.end(), mine.begin(), mine.end());
  mine.clear();
  arrive(at);
}

inline void wait_for_phase(uint32_t at, uint32_t parity) {
  auto& phase = emulated::phases.at(at);
  emulated::wait_while(phase.parity, parity);
  for (const auto& copy : phase.landed) {
    emulated::carry_out(copy);
  }
  phase.landed.clear();
}

template <int kCount>
void sync_some(int number) {
  auto& barrier = emulated::some.try_emplace(number, emulated::Barrier{kCount}).first->second;
  emulated::wait(barrier);
}

template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}
inline void let_products_see() {}
inline void begin_products() {}

inline void end_products() {
  emulated::together([](emulated::Warpgroup& mine) { mine.groups.emplace_back(); });
}

template <int kPending>
void wait_for_products() {
  for (int i = 0; i < emulated::kPatience && !emulated::is_hasty(); ++i) {
    emulated::stop();
  }
  emulated::together([](emulated::Warpgroup& mine) {
    for (; static_cast<int>(mine.groups.size()) - 1 > kPending; mine.groups.erase(mine.groups.begin())) {
      for (auto& product : mine.groups.front()) {
        emulated::make(product);
      }
    }
  });
}

template <int kCount>
void pin(float (&)[kCount]) {}

inline uint64_t operand(uint32_t at, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>(stride / 16) << 32 | static_cast<uint64_t>(leading / 16) << 16 | at / 16;
}
inline uint64_t advance(uint64_t operand, uint32_t bytes) { return operand + bytes / 16; }

inline void multiply_64x64(float (&y)[32], uint64_t a, uint64_t b, bool add) {
  emulated::warpgroup().made.y[threadIdx.x % 128] = y;
  emulated::issue(a, b, 64, add, false);
}

inline void multiply_64x128(float (&y)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  auto& made = emulated::warpgroup().made;
  made.y[threadIdx.x % 128] = y;
  uint32_t* a = made.a_words[threadIdx.x % 128];
  a[0] = a0, a[1] = a1, a[2] = a2, a[3] = a3;
  emulated::issue(0, b, 128, true, true);
}

}  // namespace mtp::cuda
