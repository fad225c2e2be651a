// The kernels for whatever the compiler was told to build for.
#include "args.h"

#define LANES inline __attribute__((always_inline))

namespace mmserve::plain {
#include "lanes_plain.h"

#include "elementwise.h"

#include "linear.h"

#include "flash.h"

#include "dense.h"

#include "decode.h"

#include "table.h"

const InstructionSet& instruction_set() {
  static const InstructionSet set = {"plain", kernels<Bf16>(), kernels<float>(), false, false};
  return set;
}
}  // namespace mmserve::plain
