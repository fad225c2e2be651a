// Products of many rows with a weight: y = act(x W^T + bias) + residual.
//
// The rows are packed, a panel of up to P = NR * W of them side by side, and the weight is read as the model has it:
// a tile is 6 weight rows, whose units are broadcast, times a panel. So nothing of a weight is kept twice, and what
// is packed is small beside the product. Tiles come out with a weight row in each vector; they are turned in place
// of being stored, and bias, activation and residual are added on the way.
// A row's result depends on no other row: each output is summed over k in order, in a lane of its own.
//     packed rows    [panel][unit of k][rows of the panel]
#pragma once

static_assert(kDenseColumns % MR == 0 && kDenseColumns % W == 0);

static int64_t dense_panels(int64_t rows) { return Panels(rows).count; }

template <typename T>
static int64_t dense_bytes(int64_t rows, int64_t k) {
  return Panels(rows).vectors * W * (k / kUnit<T>) * 4;
}

template <typename T>
static void dense_pack(const DenseArgs& args, int64_t panel) {
  const Panels panels(args.rows);
  const int64_t units = args.k / kUnit<T>, begin = panels.first(panel), width = panels.first(panel + 1) - begin;
  char* to = static_cast<char*>(args.packed) + begin * W * units * 4;
  for (int64_t v = 0; v < width; ++v) {
    const int64_t row0 = (begin + v) * W;
    const int rows = static_cast<int>(at_most(W, args.rows - row0));
    const T* x = static_cast<const T*>(args.x) + row0 * args.x_stride;
    for (int64_t u = 0; u < units; u += W) {
      const int n = static_cast<int>(at_most(W, units - u));
      U lines[W];
      for (int i = 0; i < W; ++i)
        lines[i] = i < rows ? u_load_first(x + i * args.x_stride + u * kUnit<T>, n) : u_zero();
      u_transpose(lines);
      for (int i = 0; i < n; ++i) u_store(to + ((u + i) * width + v) * W * 4, lines[i]);
    }
  }
}

template <Activation kind>
LANES F activated(F x) {
  if constexpr (kind == Activation::kGeluTanh) return f_gelu(x);
  if constexpr (kind == Activation::kQuickGelu) return f_mul(x, f_sigmoid(f_mul(f_set(1.702f), x)));
  return x;
}

// One square of sums, W columns of W rows: turned and stored, the first `rows` x `n` of it.
template <typename T, Activation kind, bool kWhole>
LANES void dense_square(const DenseArgs& args, const float* sums, int64_t stride, int64_t row0, int64_t n0, int rows,
                        int n) {
  const T *bias = static_cast<const T*>(args.bias), *residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y) + row0 * args.y_stride + n0;
  U lines[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) lines[i] = kWhole || i < n ? u_load(sums + i * stride) : u_zero();
  u_transpose(lines);
  const F more = !bias ? f_set(0.0f) : kWhole ? e_load<T>(bias + n0) : e_load_first(bias + n0, n);
#pragma GCC unroll 4
  for (int i = 0; i < (kWhole ? W : rows); ++i) {
    F value = activated<kind>(f_add(f_from(lines[i]), more));
    const int64_t at = i * args.y_stride;
    if (residual) {
      const T* other = residual + row0 * args.y_stride + n0 + at;
      value = f_add(value, kWhole ? e_load<T>(other) : e_load_first(other, n));
    }
    if constexpr (kWhole)
      e_store(y + at, value);
    else
      e_store_first(y + at, value, n);
  }
}

// sums[columns, width * W] of a panel -> rows of y, columns n0 and on.
template <typename T, Activation kind>
static void dense_finish(const DenseArgs& args, const float* sums, int64_t row0, int64_t width, int64_t n0,
                         int64_t columns) {
  for (int64_t v = 0; v < width; ++v) {
    const int64_t row = row0 + v * W;
    const int rows = static_cast<int>(at_most(W, args.rows - row));
    for (int64_t c = 0; c < columns; c += W) {
      const int n = static_cast<int>(at_most(W, columns - c));
      const float* square = sums + (c * width + v) * W;
      if (rows == W && n == W)
        dense_square<T, kind, true>(args, square, width * W, row, n0 + c, W, W);
      else
        dense_square<T, kind, false>(args, square, width * W, row, n0 + c, rows, n);
    }
  }
}

static DenseBlock dense_block(int64_t) { return {4, false}; }

static int64_t dense_scratch(int64_t) { return 0; }

template <typename T, Activation kind>
static void dense_panel(const DenseArgs& args, int64_t panel, int64_t n_begin, int64_t n_end) {
  const Panels panels(args.rows);
  const int64_t units = args.k / kUnit<T>, begin = panels.first(panel), width = panels.first(panel + 1) - begin;
  const char* rows = static_cast<const char*>(args.packed) + begin * W * units * 4;
  const uint32_t* weight = static_cast<const uint32_t*>(args.weight);
  alignas(64) float sums[kDenseColumns * P];
  for (int64_t n = n_begin; n < n_end; n += kDenseColumns) {
    const int64_t columns = at_most(kDenseColumns, n_end - n);
    panel_tiles<T, false>(width, weight + n * units, units, rows, units, sums, width * W, sums, columns);
    dense_finish<T, kind>(args, sums, begin * W, width, n, columns);
  }
}

// Panels of packed rows times weight rows n_begin .. n_end.
template <typename T>
static void dense(const DenseArgs& args, int64_t panel_begin, int64_t panel_end, int64_t n_begin, int64_t n_end, void*) {
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    if (args.activation == Activation::kGeluTanh)
      dense_panel<T, Activation::kGeluTanh>(args, panel, n_begin, n_end);
    else if (args.activation == Activation::kQuickGelu)
      dense_panel<T, Activation::kQuickGelu>(args, panel, n_begin, n_end);
    else
      dense_panel<T, Activation::kNone>(args, panel, n_begin, n_end);
  }
}
