#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace mtp::cpu {
namespace {

Isa widest() {
#if defined(MTP_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(MTP_AVX512)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  const bool avx512 = false;
#endif
  if (!avx2) {
    return Isa::kBase;
  }
  return !avx512 ? Isa::kAvx2 : __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
#else
  return Isa::kBase;
#endif
}

Isa chosen() {
  const char* asked = std::getenv("MTP_CPU_ISA");
  const std::string name = asked ? asked : "";
  const Isa most = widest();
  const Isa wanted = name == "base"     ? Isa::kBase
                     : name == "avx2"   ? Isa::kAvx2
                     : name == "avx512" ? Isa::kAvx512
                                        : Isa::kAvx512Bf16;
  return std::min(wanted, most);
}

}  // namespace

Isa isa() {
  static const Isa found = chosen();
  return found;
}

}  // namespace mtp::cpu
