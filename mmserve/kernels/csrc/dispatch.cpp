#include "dispatch.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

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

bool has_matrix_units() {
#if defined(__x86_64__) || defined(_M_X64)
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);  // AMX-BF16
#else
  return false;
#endif
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

bool dense_pays(size_t element_size) {
  static const bool matrix_units = has_matrix_units();
  return element_size == 2 && !matrix_units && active().load(std::memory_order_relaxed)->dense_bf16;
}

}  // namespace mmserve
