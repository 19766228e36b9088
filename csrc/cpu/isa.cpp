#include "isa.h"

#include <cstdlib>
#include <string>

namespace mtp::cpu {
namespace {

Isa widest() {
#if defined(MTP_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx2 && avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kBase;
#else
  return Isa::kBase;
#endif
}

Isa chosen() {
  const char* asked = std::getenv("MTP_CPU_ISA");
  const std::string name = asked ? asked : "";
  const Isa most = widest();
  if (name == "base") {
    return Isa::kBase;
  }
  return name == "avx2" && most == Isa::kAvx512 ? Isa::kAvx2 : most;
}

}  // namespace

Isa isa() {
  static const Isa found = chosen();
  return found;
}

}  // namespace mtp::cpu
