// For builds under the address sanitizer, which does not look inside the instructions of the matrix units: each tile
// that is read or written is looked up first, row by row. Included before all else (-include); for GCC.
#pragma once

#if defined(__x86_64__) && defined(__SANITIZE_ADDRESS__) && __has_include(<amxtileintrin.h>)
#include <immintrin.h>
#include <sanitizer/asan_interface.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

static inline void check_tile(const void* base, int64_t stride) {
  for (int64_t row = 0; row < 16; ++row) {
    char* at = static_cast<char*>(const_cast<void*>(base)) + row * stride;
    if (const void* bad = __asan_region_is_poisoned(at, 64)) {
      std::fprintf(stderr, "row %d of a tile reaches %p, which is no memory of anything\n", static_cast<int>(row), bad);
      __asan_describe_address(const_cast<void*>(bad));
      std::abort();
    }
  }
}

#undef _tile_loadd
#define _tile_loadd(dst, base, stride)       \
  do {                                       \
    check_tile(base, stride);                \
    _tile_loadd_internal(dst, base, stride); \
  } while (0)
#undef _tile_stored
#define _tile_stored(dst, base, stride)       \
  do {                                        \
    check_tile(base, stride);                 \
    _tile_stored_internal(dst, base, stride); \
  } while (0)
#endif
