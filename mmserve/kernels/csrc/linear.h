// Products of a few rows with a weight, at the speed that the weight can be read at.
//
// The weight stays as the model has it, [n, k] row by row: nothing is packed, so a tied embedding and the
// large products of a prefill share its memory. A tile is R weight rows times M input rows with W = R * M
// accumulators; at the end one transposed sum turns those W vectors into one vector of W outputs.
// A row's result depends on neither the other rows nor on where the threads' ranges begin: each output
// is summed over k in the same lanes and the same order whatever M is.
#pragma once

template <typename T>
constexpr int kUnit = 4 / sizeof(T);  // elements in a unit

// Which of the groups of input rows this is: each fetches its share of the next weight rows, so that the memory is
// busy all the time and not only while the first group passes.
struct Turn {
  int group, groups;
};

template <typename T, int R, int M>
static inline void linear_tile(const LinearArgs& args, int64_t n0, int64_t row0, Turn turn) {
  static_assert(R * M == W);
  const int64_t units = args.k / kUnit<T>;
  const char* weight = static_cast<const char*>(args.weight) + n0 * args.k * static_cast<int64_t>(sizeof(T));
  const char* x = static_cast<const char*>(args.x) + row0 * args.x_stride * static_cast<int64_t>(sizeof(T));
  const int64_t weight_row = args.k * static_cast<int64_t>(sizeof(T));
  const int64_t x_row = args.x_stride * static_cast<int64_t>(sizeof(T));
  // W weight rows on, one line for each line read: the hardware's own prefetcher stops at pages.
  int64_t ahead[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) ahead[r] = r * turn.groups / R == turn.group ? W * weight_row : 0;

  F acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) acc[i] = f_set(0.0f);

  int64_t u = 0;
  for (; u + W <= units; u += W) {
    U row[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) row[m] = u_load(x + m * x_row + 4 * u);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const char* at = weight + r * weight_row + 4 * u;
      __builtin_prefetch(at + ahead[r]);
      const U w = u_load(at);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) acc[m * R + r] = madd<T>(acc[m * R + r], w, row[m]);
    }
  }
  if (const int rest = static_cast<int>(units - u)) {
    U row[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) row[m] = u_load_first(x + m * x_row + 4 * u, rest);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const U w = u_load_first(weight + r * weight_row + 4 * u, rest);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) acc[m * R + r] = madd<T>(acc[m * R + r], w, row[m]);
    }
  }

  float sums[W];
  f_store(sums, f_sums(acc));
  T* y = static_cast<T*>(args.y);
  const T *bias = static_cast<const T*>(args.bias), *residual = static_cast<const T*>(args.residual);
  for (int m = 0; m < M; ++m) {
    const int64_t at = (row0 + m) * args.y_stride + n0;
    F value = e_load_first(sums + m * R, R);
    if (bias) value = f_add(value, e_load_first(bias + n0, R));
    if (residual) value = f_add(value, e_load_first(residual + at, R));
    e_store_first(y + at, value, R);
  }
}

// One output: what is left where n is no multiple of a tile's rows.
template <typename T>
static void linear_one(const LinearArgs& args, int64_t n0, int64_t row) {
  const int64_t units = args.k / kUnit<T>;
  const T* weight = static_cast<const T*>(args.weight) + n0 * args.k;
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  F acc[W];
  for (int i = 0; i < W; ++i) acc[i] = f_set(0.0f);
  int64_t u = 0;
  for (; u + W <= units; u += W)
    acc[0] = madd<T>(acc[0], u_load(weight + kUnit<T> * u), u_load(x + kUnit<T> * u));
  if (const int rest = static_cast<int>(units - u))
    acc[0] = madd<T>(acc[0], u_load_first(weight + kUnit<T> * u, rest), u_load_first(x + kUnit<T> * u, rest));
  F value = f_sums(acc);
  const int64_t at = row * args.y_stride + n0;
  if (args.bias) value = f_add(value, e_load_first(static_cast<const T*>(args.bias) + n0, 1));
  if (args.residual) value = f_add(value, e_load_first(static_cast<const T*>(args.residual) + at, 1));
  e_store_first(static_cast<T*>(args.y) + at, value, 1);
}

// M rows at a time over weight rows n_begin .. n_end.
template <typename T, int M>
static void linear_rows(const LinearArgs& args, int64_t n_begin, int64_t n_end, int64_t row0, Turn turn) {
  constexpr int R = W / M;
  int64_t n = n_begin;
  for (; n + R <= n_end; n += R) linear_tile<T, R, M>(args, n, row0, turn);
  for (; n < n_end; ++n)
    for (int m = 0; m < M; ++m) linear_one<T>(args, n, row0 + m);
}

template <typename T>
static void linear(const LinearArgs& args, int64_t n_begin, int64_t n_end) {
  // Bands of weight rows small enough that the second group of input rows finds them in the first-level cache.
  const int64_t band = args.rows <= 4 ? n_end - n_begin : W;
  const int groups = static_cast<int>(args.rows / 4 + args.rows % 4 / 2 + args.rows % 2);
  for (int64_t n = n_begin; n < n_end; n += band) {
    const int64_t stop = n + band < n_end ? n + band : n_end;
    int64_t row = 0;
    Turn turn = {0, groups};
    for (; row + 4 <= args.rows; row += 4, ++turn.group) linear_rows<T, 4>(args, n, stop, row, turn);
    if (row + 2 <= args.rows) {
      linear_rows<T, 2>(args, n, stop, row, turn);
      row += 2;
      ++turn.group;
    }
    if (row < args.rows) linear_rows<T, 1>(args, n, stop, row, turn);
  }
}
