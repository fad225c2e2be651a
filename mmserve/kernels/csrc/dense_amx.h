// Products with a weight on the matrix units: what dense.h does, for any number of rows.
//
// The weight is read as the model has it: its rows are the rows of the first operand, 32 at a time, and the packed
// input rows are the second. A few rows cost what many do for each byte of the weight, less than it takes to read
// it; so one path serves all, and a row's result is the same in every batch.
//     packed rows    [panel][32 of k, the last padded with zeros][16 rows] tiles of [unit of k][row]
// Where a weight row serves many panels it is first laid out in tiles, in memory of the thread that stays in its cache.
#pragma once

constexpr int64_t kMatrixColumns = 2 * W;  // weight rows at once, at most

LANES int64_t padded_units(int64_t k) { return ceil_div(k, kTileSteps) * W; }

static int64_t matrix_dense_bytes(int64_t rows, int64_t k) { return Panels(rows).vectors * W * padded_units(k) * 4; }

static void matrix_dense_pack(const DenseArgs& args, int64_t panel) {
  const Panels panels(args.rows);
  const int64_t units = args.k / 2, begin = panels.first(panel), width = panels.first(panel + 1) - begin;
  char* to = static_cast<char*>(args.packed) + begin * W * padded_units(args.k) * 4;
  for (int64_t v = 0; v < width; ++v) {
    const int64_t row0 = (begin + v) * W;
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

static int64_t matrix_dense_scratch(int64_t k) { return kMatrixColumns * padded_units(k) * 4; }

// Weight rows in tiles: [32 of k][16 rows].
template <int R>
LANES void lay_out(const TileRows& weight, char* to) {
  for (int64_t byte = 0; byte < weight.bytes; byte += kTileRow)
    for (int64_t r = 0; r < R; ++r, to += kTile) copy_lines(weight, r * W, byte, to);
}

// 32 or 16 weight rows times the `width` vectors of a panel -> sums[rows, width * W].
template <int R, bool kAhead>
LANES void matrix_columns(const TileRows& weight, const char* packed, int64_t width, float* sums) {
  int64_t v = 0;
  for (; v + 2 <= width; v += 2)
    tile_product<R, 2, false, kAhead>(weight, packed + v * kTile, width * kTile, kTile, sums + v * W, width * W);
  if (v < width)
    tile_product<R, 1, false, kAhead>(weight, packed + v * kTile, width * kTile, 0, sums + v * W, width * W);
}

template <Activation kind, int R>
static void matrix_panels(const DenseArgs& args, int64_t panel_begin, int64_t panel_end, int64_t n_begin, int64_t n_end,
                          char* scratch) {
  const Panels panels(args.rows);
  const int64_t unit_bytes = W * 4 * padded_units(args.k), bytes = args.k * 2;
  const TileRegisters registers;
  alignas(64) float sums[R * W * P];
  for (int64_t n = n_begin; n < n_end; n += R * W) {
    const int64_t columns = at_most(R * W, n_end - n);
    TileRows weight = plain_rows(static_cast<const char*>(args.weight) + n * bytes, bytes, columns, bytes);
    if (R > 1) {
      lay_out<R>(weight, scratch);
      weight = {scratch, kTileRow, R * kTile, kTile, R * W, ceil_div(bytes, kTileRow) * kTileRow};
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const int64_t begin = panels.first(panel), width = panels.first(panel + 1) - begin;
      matrix_columns<R, R == 1>(weight, static_cast<const char*>(args.packed) + begin * unit_bytes, width, sums);
      dense_finish<Bf16, kind>(args, sums, begin * W, width, n, columns);
    }
  }
}

template <Activation kind>
static void matrix_activated(const DenseArgs& args, int64_t panel_begin, int64_t panel_end, int64_t n_begin,
                             int64_t n_end, char* scratch) {
  if (dense_panels(args.rows) == 1)
    matrix_panels<kind, 1>(args, panel_begin, panel_end, n_begin, n_end, scratch);
  else
    matrix_panels<kind, 2>(args, panel_begin, panel_end, n_begin, n_end, scratch);
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
