#include "dispatch.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <stdexcept>

namespace mmserve {
namespace {

bool has_matrix_units() {
#if defined(__x86_64__) || defined(_M_X64)
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
#else
  return false;
#endif
}

// Asks the system for the tile registers, which a process has to do once; false where it has not heard of them.
bool tile_registers_granted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool matrix_units_usable() {
  static const bool usable = has_matrix_units() && tile_registers_granted();
  return usable;
}

std::vector<const InstructionSet*> runnable() {
  std::vector<const InstructionSet*> sets;
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16")) {
#if defined(MMSERVE_AMX)
    if (matrix_units_usable()) sets.push_back(&amx::instruction_set());
#endif
    sets.push_back(&avx512::instruction_set());
  }
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

std::string missing_instruction_set() {
  if (!has_matrix_units()) return "";
  if (!matrix_units_usable()) return "amx: the system does not grant the tile registers";
#if !defined(MMSERVE_AMX)
  return "amx: the compiler has not its instructions";
#endif
  return "";
}

bool dense_pays(int64_t rows, size_t element_size) {
  const InstructionSet* set = active().load(std::memory_order_relaxed);
  if (element_size != 2) return false;
  if (set->matrix_bf16) return rows <= kMatrixRows;
  return rows >= kDenseRows && set->dense_bf16 && !matrix_units_usable();
}

bool encoder_pays(int64_t rows, size_t element_size) {
  return dense_pays(rows, element_size) || linear_is_dense(element_size);
}

bool attention_pays(size_t element_size) {
  return element_size != 2 || linear_is_dense(element_size) || !matrix_units_usable();
}

bool linear_is_dense(size_t element_size) {
  return element_size == 2 && active().load(std::memory_order_relaxed)->matrix_bf16;
}

}  // namespace mmserve
