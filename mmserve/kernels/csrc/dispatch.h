// Which instruction set runs: asked of the processor once, and open to be set by name (tests, comparisons).
#pragma once

#include <string>
#include <vector>

#include "args.h"

namespace mmserve {

// Names of the sets that this processor can run, best first.
std::vector<std::string> available_instruction_sets();
const std::string active_instruction_set();
// Throws std::invalid_argument for a name that is not available.
void use_instruction_set(const std::string& name);
// The active kernels for elements of 2 bytes (bf16) or 4 (float).
const Kernels& kernels_for(size_t element_size);

// Whether dense products of such elements are better run here than by torch: it has what a processor with matrix
// units (AMX) needs, and in float32 it is as fast.
bool dense_pays(size_t element_size);

}  // namespace mmserve
