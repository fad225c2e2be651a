// Prints the instruction sets that dispatch.cpp finds on this processor, and a line that says what it misses. The sets
// themselves are empty here: compiled in a second, with MMSERVE_WITHOUT_AMX as by a compiler that has not its instructions.
//
//     choice [refused]        the system does not grant the tile registers
#include <cstdio>
#include <cstring>

#include "dispatch.h"

static bool refused = false;

// In place of the C library's: the only call of it in dispatch.cpp is the one that asks for the tile registers.
extern "C" long syscall(long, ...) noexcept { return refused ? -1 : 0; }

#define EMPTY_SET(name)                          \
  namespace mmserve::name {                      \
  const InstructionSet& instruction_set() {      \
    static const InstructionSet set = {#name};   \
    return set;                                  \
  }                                              \
  }
#if defined(MMSERVE_AMX)
EMPTY_SET(amx)
#endif
EMPTY_SET(avx512)
EMPTY_SET(avx2)
EMPTY_SET(plain)

int main(int count, char** words) {
  refused = count > 1 && std::strcmp(words[1], "refused") == 0;
  for (const std::string& name : mmserve::available_instruction_sets()) std::printf("%s ", name.c_str());
  std::printf("\n%s\n", mmserve::missing_instruction_set().c_str());
}
