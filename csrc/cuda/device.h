// What the CUDA kernels share: bf16 pairs, sums over a warp, products of tensor cores, and early starts.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "lanes.h"
#include "sizes.h"

namespace mtp::cuda {

using bf16 = __nv_bfloat16;

// Programmatic dependent launch (sm_90 and later): the next kernel may start once every block of this one has called
// the first; what kernels in front wrote may be read after the second.
__device__ __forceinline__ void let_others_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As it is: the compiler does not take apart what it was made of.
template <class T>
__device__ __forceinline__ const T* opaque(const T* x) {
  asm("" : "+l"(x));
  return x;
}

// The thread's lane. What is made of it is made where it is used: no register keeps it from one time to the next.
__device__ __forceinline__ int lane_anew() {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  return lane;
}

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// From L2, what a kernel in front may have written: 2, 8 or 16 bytes. Volatile: the compiler takes __ldcg for an
// instruction that harms nobody, and runs it ahead of the condition that says whether there is anything to read.
template <class T>
__device__ __forceinline__ T load_fresh(const T* at) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 8 || sizeof(T) == 16);
  union {
    T value;
    uint16_t half;
    uint32_t words[4];
  } found;
  if constexpr (sizeof(T) == 2) {
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(found.half) : "l"(at));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(found.words[0]), "=r"(found.words[1]) : "l"(at));
  } else {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3])
                 : "l"(at));
  }
  return found.value;
}

__device__ __forceinline__ uint4 load_once(const void* at) {
  uint4 found;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(at));
  return found;
}

__device__ __forceinline__ uint32_t pack(float one, float two) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(one, two);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void multiply(float (&y)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(y[0]), "+f"(y[1]), "+f"(y[2]), "+f"(y[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One piece: 16 rows, 8 columns, a depth of 32.
__device__ __forceinline__ void multiply(float (&y)[4], const uint4& x, const uint4& x_below, const uint4& weight) {
  multiply(y, x.x, x_below.x, x.y, x_below.y, weight.x, weight.y);
  multiply(y, x.z, x_below.z, x.w, x_below.w, weight.z, weight.w);
}

// Asynchronous copies into shared memory, each thread's own: 16 bytes, of which those behind `bytes` become zeros. What
// is read once shall not push out of L2 what is read again. Copies are committed in groups, and waited for until all
// but the last kPending groups are there.
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, int bytes) {
  asm volatile(
      "{\n"
      ".reg .b64 once;\n"
      "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, once;\n"
      "}"
      :
      : "r"(to), "l"(from), "r"(bytes)
      : "memory");
}

// What the next kernel reads shall stay in L2, whatever else passes through it.
__device__ __forceinline__ void store_for_next(float* at, float x) {
  asm volatile(
      "{\n"
      ".reg .b64 kept;\n"
      "createpolicy.fractional.L2::evict_last.b64 kept, 1.0;\n"
      "st.global.L2::cache_hint.f32 [%0], %1, kept;\n"
      "}"
      :
      : "l"(at), "f"(x)
      : "memory");
}

__device__ __forceinline__ void store_for_next(float* at, float2 x) {
  asm volatile(
      "{\n"
      ".reg .b64 kept;\n"
      "createpolicy.fractional.L2::evict_last.b64 kept, 1.0;\n"
      "st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, kept;\n"
      "}"
      :
      : "l"(at), "f"(x.x), "f"(x.y)
      : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four matrices of 8 x 8 elements of 16 bits, a row of which each lane points to; turned, columns become rows.
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ void load_turned(uint32_t (&a)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(at)
               : "memory");
}

}  // namespace mtp::cuda
