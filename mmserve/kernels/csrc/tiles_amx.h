// The matrix units (AMX): tile registers of 16 rows by 64 bytes, and the one product that all is made of.
//
// c[16, 16] += a[16, 32] b[32, 16] takes a as its rows lie in memory and b in units: tile row u holds, for each of
// 16 columns, the pair of elements 2 u and 2 u + 1. Sums over k run in steps of 32 and in one order whatever is
// computed beside them, so an output is bit for bit the same alone, among 16 rows and among 1,000.
// Registers: 0 .. 3 sums, 4 and 5 rows (a), 6 and 7 units (b).
#pragma once

constexpr int64_t kTile = 1024;     // bytes of a tile
constexpr int64_t kTileRow = 64;    // bytes of its rows
constexpr int64_t kTileSteps = 32;  // elements of bf16 that one step sums over
constexpr int64_t kAheadSteps = 8;  // from where a row is read to where it is asked for

// What lies in memory is what was stored: the compiler does not know that the next instruction reads it.
LANES void stored(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Registers belong to the thread; they are given back, so that a switch of threads does not have to save them.
class TileRegisters {
 public:
  LANES TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } layout;
    stored(&layout);
    _tile_loadconfig(&layout);
  }
  LANES ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Rows of the first operand; what is beyond `rows` and `bytes` is taken as zero, which costs a copy.
struct TileRows {
  const char* at;
  int64_t stride;      // bytes from row to row
  int64_t step, tile;  // bytes from one step to the next, and from 16 rows to the next 16
  int64_t rows;        // at most 16 for each of the tiles
  int64_t bytes;       // of a row
};

// Rows as they are, `stride` bytes apart.
LANES TileRows plain_rows(const void* at, int64_t stride, int64_t rows, int64_t bytes) {
  return {static_cast<const char*>(at), stride, kTileRow, W * stride, rows, bytes};
}

// One line of each of 16 rows, zeros beyond.
LANES void copy_lines(const TileRows& a, int64_t first_row, int64_t byte, char* to) {
  const int units = static_cast<int>(at_most(kTileRow, a.bytes - byte) / 4);
#pragma GCC unroll 16
  for (int64_t r = 0; r < W; ++r)
    u_store(to + r * kTileRow,
            first_row + r < a.rows ? u_load_first(a.at + (first_row + r) * a.stride + byte, units) : u_zero());
}

// c[R * 16, N * 16] = a b, or with kAdd c + a b. The tiles of b lie `step_bytes` apart from step to step and
// `tile_bytes` within one. kAhead: a is read once and comes from afar, so it is asked for some steps ahead.
template <int R, int N, bool kAdd, bool kAhead>
static inline void tile_product(const TileRows& a, const char* b, int64_t step_bytes, int64_t tile_bytes, float* c,
                                int64_t c_stride) {
  static_assert(R <= 2 && N <= 2);
  stored(c);
  const int64_t c_bytes = c_stride * 4;
  float* low = c + W * c_stride;
  if constexpr (kAdd) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (N == 2) _tile_loadd(1, c + W, c_bytes);
    if constexpr (R == 2) _tile_loadd(2, low, c_bytes);
    if constexpr (R == 2 && N == 2) _tile_loadd(3, low + W, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (R == 2) _tile_zero(2);
    if constexpr (R == 2 && N == 2) _tile_zero(3);
  }
  const auto step = [&](const char* rows, int64_t stride, int64_t tile, const char* units) LANES_LAMBDA {
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, units, kTileRow);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, units + tile_bytes, kTileRow);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R == 2) {
      _tile_loadd(5, rows + tile, stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (R == 2 && N == 2) _tile_dpbf16ps(3, 5, 7);
  };
  const int64_t whole = a.rows == R * W ? a.bytes / kTileRow : 0;
  for (int64_t s = 0; s < whole; ++s, b += step_bytes) {
    const char* rows = a.at + s * a.step;
    step(rows, a.stride, a.tile, b);
    if constexpr (kAhead) {
      const char* next = s + kAheadSteps < whole ? rows : rows - whole * kTileRow + R * W * a.stride;
#pragma GCC unroll 32
      for (int64_t r = 0; r < R * W; ++r) __builtin_prefetch(next + kAheadSteps * kTileRow + r * a.stride);
    }
  }
  for (int64_t byte = whole * kTileRow; byte < a.bytes; byte += kTileRow, b += step_bytes) {
    alignas(64) char lines[R * kTile];
    for (int64_t r = 0; r < R; ++r) copy_lines(a, r * W, byte, lines + r * kTile);
    stored(lines);
    step(lines, kTileRow, kTile, b);
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (N == 2) _tile_stored(1, c + W, c_bytes);
  if constexpr (R == 2) _tile_stored(2, low, c_bytes);
  if constexpr (R == 2 && N == 2) _tile_stored(3, low + W, c_bytes);
}
