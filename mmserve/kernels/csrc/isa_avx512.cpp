// The kernels for AVX-512 with BF16 (AMD Zen 4, Intel Cooper Lake and later).
//
// The target is set by pragma: only these functions may use it, and dispatch.cpp asks the processor before
// it calls them. Nothing of the standard library is included below the pragma, so no inline function of it
// can be compiled for this target and then be picked by the linker for everyone.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "args.h"

#define LANES inline __attribute__((always_inline))

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2")
#endif

namespace mmserve::avx512 {
#include "lanes_avx512.h"

#include "elementwise.h"

#include "linear.h"

#include "flash.h"

#include "dense.h"

#include "decode.h"

#include "table.h"

const InstructionSet& instruction_set() {
  static const InstructionSet set = {"avx512", kernels<Bf16>(), kernels<float>(), true, false};
  return set;
}
}  // namespace mmserve::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
