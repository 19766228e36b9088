// What a block of several warpgroups has on Hopper (sm_90a): barriers in shared memory, and products of 64 rows whose
// operands lie there.
#pragma once

#include "device.h"

namespace mtp::cuda {

// A barrier in shared memory: so many arrivals end its first phase, so many more the second. A wait for the phase of
// even number, 0, 2, ..., has parity 0.
__device__ __forceinline__ void init_barrier(uint32_t at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t at) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "}" ::"r"(at)
      : "memory");
}

// Arrives once the copies that this thread has asked for are there.
__device__ __forceinline__ void arrive_with_copies(uint32_t at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

__device__ __forceinline__ void wait_for_phase(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni there;\n"
      "bra.uni again;\n"
      "there:\n"
      "}" ::"r"(at),
      "r"(parity)
      : "memory");
}

// The barrier of that number, for so many threads of the block.
template <int kCount>
__device__ __forceinline__ void sync_some(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kCount) : "memory");
}

// Of each thread of a warpgroup, from here on: the others' share of the block's registers grows or shrinks.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Before products read what was written to shared memory in other ways.
__device__ __forceinline__ void let_products_see() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Products run beside what follows them. Before the first that takes registers which were written; in groups; until
// all but the last kPending groups are done.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Nothing that uses these values moves to the other side of this.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(x[i])::"memory");
  }
}

// Where an operand lies: rows of 128 bytes, whose 16 bytes of number i are where number i ^ row % 8 would be, in eights
// `stride` bytes apart. `leading`: of an operand whose rows are its depth, from one block of 64 columns to the next.
__device__ __forceinline__ uint64_t operand(uint32_t at, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(stride / 16) << 32 | static_cast<uint64_t>(leading / 16) << 16 | at / 16;
}

__device__ __forceinline__ uint64_t advance(uint64_t operand, uint32_t bytes) { return operand + bytes / 16; }

// y [64, 64] = a [64, 16] b^T, or y + that: a warp has 16 rows of y, a lane of it rows lane / 4 and 8 below, columns
// lane % 4 * 2 and the next of each eight, in the order of columns, both of the upper row first. b is [64, 16].
__device__ __forceinline__ void multiply_64x64(float (&y)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n"
      "}"
      : "+f"(y[0]), "+f"(y[1]), "+f"(y[2]), "+f"(y[3]), "+f"(y[4]), "+f"(y[5]), "+f"(y[6]), "+f"(y[7]), "+f"(y[8]),
        "+f"(y[9]), "+f"(y[10]), "+f"(y[11]), "+f"(y[12]), "+f"(y[13]), "+f"(y[14]), "+f"(y[15]), "+f"(y[16]),
        "+f"(y[17]), "+f"(y[18]), "+f"(y[19]), "+f"(y[20]), "+f"(y[21]), "+f"(y[22]), "+f"(y[23]), "+f"(y[24]),
        "+f"(y[25]), "+f"(y[26]), "+f"(y[27]), "+f"(y[28]), "+f"(y[29]), "+f"(y[30]), "+f"(y[31])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// y [64, 128] += a [64, 16] b. A lane has of a what it has of y's first two eights of columns, in pairs of 16 bits; b
// is [16, 128], rows its depth.
__device__ __forceinline__ void multiply_64x128(float (&y)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : "+f"(y[0]), "+f"(y[1]), "+f"(y[2]), "+f"(y[3]), "+f"(y[4]), "+f"(y[5]), "+f"(y[6]), "+f"(y[7]), "+f"(y[8]),
        "+f"(y[9]), "+f"(y[10]), "+f"(y[11]), "+f"(y[12]), "+f"(y[13]), "+f"(y[14]), "+f"(y[15]), "+f"(y[16]),
        "+f"(y[17]), "+f"(y[18]), "+f"(y[19]), "+f"(y[20]), "+f"(y[21]), "+f"(y[22]), "+f"(y[23]), "+f"(y[24]),
        "+f"(y[25]), "+f"(y[26]), "+f"(y[27]), "+f"(y[28]), "+f"(y[29]), "+f"(y[30]), "+f"(y[31]), "+f"(y[32]),
        "+f"(y[33]), "+f"(y[34]), "+f"(y[35]), "+f"(y[36]), "+f"(y[37]), "+f"(y[38]), "+f"(y[39]), "+f"(y[40]),
        "+f"(y[41]), "+f"(y[42]), "+f"(y[43]), "+f"(y[44]), "+f"(y[45]), "+f"(y[46]), "+f"(y[47]), "+f"(y[48]),
        "+f"(y[49]), "+f"(y[50]), "+f"(y[51]), "+f"(y[52]), "+f"(y[53]), "+f"(y[54]), "+f"(y[55]), "+f"(y[56]),
        "+f"(y[57]), "+f"(y[58]), "+f"(y[59]), "+f"(y[60]), "+f"(y[61]), "+f"(y[62]), "+f"(y[63])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

}  // namespace mtp::cuda
