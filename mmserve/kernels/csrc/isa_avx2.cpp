// The kernels for AVX2 with FMA.
//
// The target is set by pragma: only these functions may use it, and dispatch.cpp asks the processor before
// it calls them. Nothing of the standard library is included below the pragma, so no inline function of it
// can be compiled for this target and then be picked by the linker for everyone.
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#include "args.h"

#define LANES inline __attribute__((always_inline))

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
#endif

namespace mmserve::avx2 {
#include "lanes_avx2.h"

#include "elementwise.h"

#include "linear.h"

#include "flash.h"

#include "dense.h"

#include "decode.h"

#include "table.h"

const InstructionSet& instruction_set() {
  static const InstructionSet set = {"avx2", kernels<Bf16>(), kernels<float>(), false, false};
  return set;
}
}  // namespace mmserve::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
