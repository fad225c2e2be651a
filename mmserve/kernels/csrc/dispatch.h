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

// What the processor could run but this library can not, in words; empty where there is nothing.
std::string missing_instruction_set();

// Whether `dense` of so many rows is better than torch's product here: on matrix units for some, where the processor
// has none for many. In float32 torch is as fast.
bool dense_pays(int64_t rows, size_t element_size);
// Whether a tower's layer of so many rows is better as one call: what it saves between its products outweighs that
// torch's are a little faster on matrix units.
bool encoder_pays(int64_t rows, size_t element_size);
// Whether attention of many queries is better than torch's: torch uses matrix units where there are any.
bool attention_pays(size_t element_size);
// Whether few rows too go through `dense`.
bool linear_is_dense(size_t element_size);

}  // namespace mmserve
