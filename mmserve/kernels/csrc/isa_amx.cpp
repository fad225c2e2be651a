// The kernels for AMX (Intel Sapphire Rapids and later): those of AVX-512, with products and attention of bf16 on the
// matrix units. Empty where the compiler has not their instructions (GCC and Clang before 11).
//
// As in isa_avx512.cpp the target is set by pragma, and nothing of the standard library is included below it.
#include "args.h"

#if defined(MMSERVE_AMX)
#include <immintrin.h>

#define LANES inline __attribute__((always_inline))
#define LANES_LAMBDA __attribute__((always_inline))

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi2,amx-tile,amx-bf16")
#endif

namespace mmserve::amx {
#include "lanes_avx512.h"

#include "elementwise.h"

#include "linear.h"

#include "flash.h"

#include "dense.h"

#include "tiles_amx.h"

#include "dense_amx.h"

#include "flash_amx.h"

static InstructionSet with_matrix_units(InstructionSet set) {
  set.name = "amx";
  set.matrix_bf16 = true;
  set.bf16.dense_panels = matrix_dense_panels;
  set.bf16.dense_block = matrix_dense_block;
  set.bf16.dense_bytes = matrix_dense_bytes;
  set.bf16.dense_pack = matrix_dense_pack;
  set.bf16.dense_scratch = matrix_dense_scratch;
  set.bf16.dense = matrix_dense;
  set.bf16.flash_sizes = matrix_flash_sizes;
  set.bf16.flash_pack = matrix_flash_pack;
  set.bf16.flash_scratch = matrix_flash_scratch;
  set.bf16.flash_rows = matrix_flash_rows;
  return set;
}

const InstructionSet& instruction_set() {
  static const InstructionSet set = with_matrix_units(avx512::instruction_set());
  return set;
}
}  // namespace mmserve::amx

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
