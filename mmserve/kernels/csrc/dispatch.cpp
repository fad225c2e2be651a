#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace mmserve {
namespace {

std::vector<const InstructionSet*> runnable() {
  std::vector<const InstructionSet*> sets;
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
    sets.push_back(&avx512::instruction_set());
  if (avx2) sets.push_back(&avx2::instruction_set());
#endif
  sets.push_back(&plain::instruction_set());
  return sets;
}

const std::vector<const InstructionSet*>& sets() {
  static const std::vector<const InstructionSet*> found = runnable();
  return found;
}

std::atomic<const InstructionSet*>& active() {
  static std::atomic<const InstructionSet*> chosen{sets().front()};
  return chosen;
}

}  // namespace

std::vector<std::string> available_instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet* set : sets()) names.emplace_back(set->name);
  return names;
}

const std::string active_instruction_set() { return active().load()->name; }

void use_instruction_set(const std::string& name) {
  for (const InstructionSet* set : sets())
    if (name == set->name) {
      active().store(set);
      return;
    }
  throw std::invalid_argument("this processor can not run the kernels for '" + name + "'");
}

const Kernels& kernels_for(size_t element_size) {
  const InstructionSet* set = active().load(std::memory_order_relaxed);
  return element_size == 2 ? set->bf16 : set->f32;
}

}  // namespace mmserve
