// Which compilation of the kernels runs on this machine.
#pragma once

namespace mtp::cpu {

enum class Isa { kBase, kAvx2, kAvx512, kAvx512Bf16 };

// The widest that both the build and the processor have; MTP_CPU_ISA=base|avx2|avx512|avx512_bf16 asks for a narrower
// one.
Isa isa();

}  // namespace mtp::cpu

#if defined(MTP_AVX512)
#define MTP_AVX512_CASES(name)    \
  case Isa::kAvx512Bf16:          \
    return isa_avx512_bf16::name; \
  case Isa::kAvx512:              \
    return isa_avx512::name;
#else
#define MTP_AVX512_CASES(name)
#endif

// Declares the table `name` of type `Type` that each compilation of a kernel's file defines in its namespace, and
// mtp::cpu::name(), the one for this machine. At global scope; Type is in namespace mtp.
#if defined(MTP_X86)
#define MTP_KERNELS(Type, name) \
  namespace mtp {               \
  namespace isa_base {          \
  extern const Type name;       \
  }                             \
  namespace isa_avx2 {          \
  extern const Type name;       \
  }                             \
  namespace isa_avx512 {        \
  extern const Type name;       \
  }                             \
  namespace isa_avx512_bf16 {   \
  extern const Type name;       \
  }                             \
  namespace cpu {               \
  inline const Type& name() {   \
    switch (isa()) {            \
      MTP_AVX512_CASES(name)    \
      case Isa::kAvx2:          \
        return isa_avx2::name;  \
      default:                  \
        return isa_base::name;  \
    }                           \
  }                             \
  }                             \
  }
#else
#define MTP_KERNELS(Type, name)                        \
  namespace mtp {                                      \
  namespace isa_base {                                 \
  extern const Type name;                              \
  }                                                    \
  namespace cpu {                                      \
  inline const Type& name() { return isa_base::name; } \
  }                                                    \
  }
#endif
