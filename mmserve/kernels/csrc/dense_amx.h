// Products with a weight on the matrix units: what dense.h does, for any number of rows.
//
// The weight is read as the model has it: its rows are the rows of the first operand, and the packed input rows
// are the second. A few rows cost what many do for each byte of the weight, less than it takes to read it; so one
// path serves all, and a row's result is the same in every batch: sums run over k in steps, in one order.
//     packed rows    [panel][32 of k, the last padded with zeros][16 rows] tiles of [unit of k][row]
// Many rows: 32 weight rows meet all panels of a block, kChunk of k at a time, so that what the panels share is
// still in the first-level cache when the next one comes. Twice as fast as all of k at once, though sums are read back.
#pragma once

constexpr int64_t kMatrixFew = 64;                 // the most rows that are bound by reading the weight
constexpr int64_t kMatrixPanel = 2;                // vectors of a panel, at most
constexpr int64_t kMatrixColumns = 2 * W;          // weight rows at once, at most
constexpr int64_t kMatrixBlock = 512;              // rows that meet a weight row together, at most,
constexpr int64_t kMatrixBlockBytes = 1536 << 10;  // and bytes of them: they stay in a second-level cache of 2 MB
constexpr int64_t kChunk = 8 * kTileRow;           // bytes of a row: those of 32 weight rows and of 32 rows are 32 KB
constexpr int64_t kClash = 4096;                   // rows so far apart, or a multiple, share one set of the cache
constexpr int64_t kPanelSums = kMatrixColumns * kMatrixPanel * W;

LANES int64_t padded_units(int64_t k) { return ceil_div(k, kTileSteps) * W; }

static int64_t matrix_dense_panels(int64_t rows) { return ceil_div(rows, kMatrixPanel * W); }

static int64_t matrix_dense_bytes(int64_t rows, int64_t k) { return ceil_div(rows, W) * W * padded_units(k) * 4; }

static DenseBlock matrix_dense_block(int64_t k) {
  const int64_t panel_rows = kMatrixPanel * W, fit = kMatrixBlockBytes / (k * 2 * panel_rows);
  return {fit < 1 ? 1 : at_most(fit, kMatrixBlock / panel_rows), true};
}

// Vectors of rows in a panel.
LANES int64_t panel_width(const DenseArgs& args, int64_t panel) {
  return at_most(kMatrixPanel, ceil_div(args.rows, W) - panel * kMatrixPanel);
}

LANES char* panel_tiles_at(const DenseArgs& args, int64_t panel) {
  return static_cast<char*>(args.packed) + panel * kMatrixPanel * W * padded_units(args.k) * 4;
}

static void matrix_dense_pack(const DenseArgs& args, int64_t panel) {
  const int64_t units = args.k / 2, width = panel_width(args, panel);
  char* to = panel_tiles_at(args, panel);
  for (int64_t v = 0; v < width; ++v) {
    const int64_t row0 = (panel * kMatrixPanel + v) * W;
    const int rows = static_cast<int>(at_most(W, args.rows - row0));
    const Bf16* x = static_cast<const Bf16*>(args.x) + row0 * args.x_stride;
    for (int64_t u = 0; u < units; u += W) {
      const int n = static_cast<int>(at_most(W, units - u));
      U lines[W];
      for (int i = 0; i < W; ++i) lines[i] = i < rows ? u_load_first(x + i * args.x_stride + u * 2, n) : u_zero();
      u_transpose(lines);
      char* tile = to + (u / W * width + v) * kTile;
      for (int i = 0; i < W; ++i) u_store(tile + i * kTileRow, lines[i]);
    }
  }
}

// Sums of a block, and 32 weight rows of a chunk in tiles.
static int64_t matrix_dense_scratch(int64_t k) {
  return matrix_dense_block(k).panels * kPanelSums * 4 + kMatrixColumns * kChunk;
}

// Weight rows in tiles: [32 of k][R][16 rows].
template <int R>
LANES TileRows laid_out(const TileRows& weight, char* to) {
  char* at = to;
  for (int64_t byte = 0; byte < weight.bytes; byte += kTileRow)
    for (int64_t r = 0; r < R; ++r, at += kTile) copy_lines(weight, r * W, byte, at);
  return {to, kTileRow, R * kTile, kTile, R * W, ceil_div(weight.bytes, kTileRow) * kTileRow};
}

// R * 16 weight rows times a panel: sums[rows, width * W] from 0, or with kAdd more of them.
template <int R, bool kAdd>
LANES void matrix_sums(const TileRows& weight, const char* packed, int64_t width, float* sums) {
  constexpr bool kAhead = R == 1;
  if (width == 2)
    tile_product<R, 2, kAdd, kAhead>(weight, packed, 2 * kTile, kTile, sums, 2 * W);
  else
    tile_product<R, 1, kAdd, kAhead>(weight, packed, kTile, 0, sums, W);
}

// Asks for the lines that a panel's outputs go to: the stores would wait for them one by one.
LANES void ask_for_outputs(const DenseArgs& args, int64_t panel, int64_t n) {
  const int64_t row0 = panel * kMatrixPanel * W, rows = at_most(kMatrixPanel * W, args.rows - row0);
  const Bf16* y = static_cast<const Bf16*>(args.y) + row0 * args.y_stride + n;
  for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(y + r * args.y_stride, 1);
  if (!args.residual) return;
  const Bf16* other = static_cast<const Bf16*>(args.residual) + row0 * args.y_stride + n;
  for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(other + r * args.y_stride);
}

// A block of panels times R * 16 weight rows, `chunk` bytes of k at a time; `columns` of them are there.
template <Activation kind, int R>
LANES void matrix_block(const DenseArgs& args, int64_t panel_begin, int64_t panel_end, int64_t n, int64_t columns,
                        int64_t chunk, float* sums, char* tiles) {
  const int64_t bytes = args.k * 2;
  const char* weight = static_cast<const char*>(args.weight) + n * bytes;
  for (int64_t byte = 0; byte < bytes; byte += chunk) {
    const int64_t length = at_most(chunk, bytes - byte);
    TileRows part = plain_rows(weight + byte, bytes, columns, length);
    if (R > 1 && (bytes % kClash == 0 || columns < R * W)) part = laid_out<R>(part, tiles);
    float* c = sums;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel, c += kPanelSums) {
      const int64_t width = panel_width(args, panel);
      const bool last = byte + length == bytes;
      if (R > 1 && last) ask_for_outputs(args, panel, n);
      const char* packed = panel_tiles_at(args, panel) + byte / kTileRow * width * kTile;
      if (byte == 0)
        matrix_sums<R, false>(part, packed, width, c);
      else
        matrix_sums<R, true>(part, packed, width, c);
      if (last) dense_finish<Bf16, kind>(args, c, panel * kMatrixPanel * W, width, n, columns);
    }
  }
}

template <Activation kind>
static void matrix_activated(const DenseArgs& args, int64_t panel_begin, int64_t panel_end, int64_t n_begin,
                             int64_t n_end, char* scratch) {
  const TileRegisters registers;
  const int64_t block = matrix_dense_block(args.k).panels;
  float* sums = reinterpret_cast<float*>(scratch);
  char* tiles = scratch + block * kPanelSums * 4;
  const bool few = args.rows <= kMatrixFew;
  const int64_t step = few ? W : kMatrixColumns;
  for (int64_t first = panel_begin; first < panel_end; first += block) {
    const int64_t last = at_most(first + block, panel_end);
    for (int64_t n = n_begin; n < n_end; n += step) {
      const int64_t columns = at_most(step, n_end - n);
      if (few)
        matrix_block<kind, 1>(args, first, last, n, columns, args.k * 2, sums, tiles);
      else
        matrix_block<kind, 2>(args, first, last, n, columns, kChunk, sums, tiles);
    }
  }
}

static void matrix_dense(const DenseArgs& args, int64_t panel_begin, int64_t panel_end, int64_t n_begin, int64_t n_end,
                         void* scratch_) {
  char* scratch = static_cast<char*>(scratch_);
  if (args.activation == Activation::kGeluTanh)
    return matrix_activated<Activation::kGeluTanh>(args, panel_begin, panel_end, n_begin, n_end, scratch);
  if (args.activation == Activation::kQuickGelu)
    return matrix_activated<Activation::kQuickGelu>(args, panel_begin, panel_end, n_begin, n_end, scratch);
  matrix_activated<Activation::kNone>(args, panel_begin, panel_end, n_begin, n_end, scratch);
}
