// Runs csrc/cuda/attend_kernel.h and frontier_kernel.h on a CPU (device.h): the blocks of a launch one after the other.
#include "attend.h"

#include "block.h"
#include "device.h"

namespace mtp::cuda {
namespace {

constexpr int kBehind = 4096;  // bytes of shared memory that nobody may write
alignas(1024) unsigned char memory[emulated::kShared + kBehind];

}  // namespace
}  // namespace mtp::cuda

#include "attend_kernel.h"
#include "frontier_kernel.h"

// 0, or 1 where a block has written behind its shared memory. The arguments as mtp_cuda::attend makes them.
extern "C" int emulate_attend(const void* const* p, const int64_t* n, const float* f, int blocks) {
  using namespace mtp::cuda;
  Attend a;
  a.q = *p++, a.k = *p++, a.v = *p++, a.table = *p++, a.lengths = *p++, a.indptr = *p++, a.norm = *p++;
  a.freq = static_cast<const float*>(*p++), a.positions = *p++, a.k_scale = static_cast<const float*>(*p++);
  a.partial = static_cast<float*>(const_cast<void*>(*p++)), a.stats = static_cast<float*>(const_cast<void*>(*p++));
  const auto next = [&n] { return static_cast<int>(*n++); };
  a.table_is_int64 = *n++ != 0, a.lengths_are_int64 = *n++ != 0, a.indptr_is_int64 = *n++ != 0;
  a.positions_are_int64 = *n++ != 0;
  a.q_stride_batch = *n++, a.q_stride_row = *n++, a.q_stride_head = *n++;
  a.stride_page = static_cast<uint32_t>(*n++ / 8), a.stride_slot = static_cast<uint32_t>(*n++ / 8);
  a.k_stride_head = *n++, a.v_stride_head = *n++;
  a.table_stride = *n++, a.table_size = *n++, a.position_stride_batch = *n++, a.position_stride = *n++;
  a.k_scale_stride = *n++;
  a.num_pages = next(), a.page_size = next(), a.bound = next(), a.log2_max_chunks = next(), a.chunks_a_part = next();
  a.folds_a_part = next(), a.column_blocks = next();
  a.parts = next(), a.batch = next(), a.rows = next(), a.kv_heads = next(), a.group = next();
  a.head_dim = next(), a.num_pairs = next();
  a.group_inverse = (65536 + a.group - 1) / a.group;
  a.chunk_weight = f[0], a.sm_scale = f[1], a.eps = f[2];

  void (*kernel)(Attend) = nullptr;
  const auto use = [&kernel](void (*found)(Attend), int threads, int shared) {
    kernel = found;
    emulated::all.members = threads;
    return shared;
  };
  const int bytes = is_frontier(a.head_dim, a.rows * a.group) ? with_frontier(a, use) : with_kernel(a, use);
  emulated::shared = memory;
  emulated::grid.x = blocks;
  int wrong = bytes > emulated::kShared ? 1 : 0;
  for (emulated::block.x = 0; emulated::block.x < blocks && wrong == 0; ++emulated::block.x) {
    std::memset(memory, 0xff, sizeof memory);  // NaN
    emulated::run_block([&] { kernel(a); });
    for (int i = 0; i < kBehind; ++i) {
      wrong |= memory[bytes + i] != 0xff ? 1 : 0;
    }
  }
  return wrong;
}
