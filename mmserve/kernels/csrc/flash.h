// Attention of many queries over their keys: blocks of scores that stay in the cache, softmax as they come.
//
// A query sees one interval of keys [lo, hi): causal, window, chunk and both-way span all come to that, since
// each holds the query's own position. So a mask is two integers a query, and blocks outside are never computed.
//
// Rows are (query, head of the group), all heads of a group against the same packed keys and values:
//     packed keys    [panel of P = NR * W keys][unit of D][P units]      the columns of Q K^T
//     packed values  [panel of vectors of Dv][unit of keys][its lanes]   the columns of P V
// Both products run through one tile: 6 rows times a panel, operands broadcast from the rows.
#pragma once

constexpr int MR = 6;
constexpr int P = NR * W;
constexpr int64_t kBlockKeys = 256;  // keys scored at once
static_assert(kFlashRows % MR == 0 && kBlockKeys % P == 0 && kPackStep % P == 0);

LANES int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LANES int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// A count of lanes in vectors, split over panels as evenly as it goes: 5 vectors are 3 + 2, not 4 + 1.
struct Panels {
  int64_t vectors, count;
  LANES explicit Panels(int64_t lanes) : vectors(ceil_div(lanes, W)), count(ceil_div(vectors, NR)) {}
  LANES int64_t first(int64_t panel) const { return panel * vectors / count; }
};

LANES int64_t padded_keys(int64_t keys) { return ceil_div(keys, P) * P; }

template <typename T>
static PackSizes flash_sizes(const AttentionArgs& args, int64_t num_keys) {
  const int64_t keys = padded_keys(num_keys);
  return {keys * (args.d / kUnit<T>)*4, (keys / kUnit<T>)*Panels(args.dv).vectors * W * 4};
}

LANES int64_t slot_of(const KeySource& source, int64_t key) {
  return source.table ? source.table[key / source.block_size] * source.block_size + key % source.block_size : key;
}

// Keys key_begin .. key_end of the job; key_begin a multiple of kPackStep, key_end too unless it is the last.
template <typename T>
static void flash_pack(const AttentionArgs& args, const FlashJob& job, int64_t key_begin, int64_t key_end) {
  const KeySource& source = job.source;
  const T* key = static_cast<const T*>(source.key) + job.kv_head * source.key_head;
  const T* value = static_cast<const T*>(source.value) + job.kv_head * source.value_head;
  const int64_t units = args.d / kUnit<T>, all_keys = padded_keys(job.num_keys);
  const Panels panels(args.dv);
  char* packed_keys = static_cast<char*>(job.keys);
  char* packed_values = static_cast<char*>(job.values);

  for (int64_t k = key_begin; k < padded_keys(key_end); k += W) {
    int64_t slots[W];
    for (int i = 0; i < W; ++i) slots[i] = k + i < job.num_keys ? slot_of(source, k + i) : -1;

    char* panel = packed_keys + (k / P) * units * P * 4 + (k % P) * 4;
    for (int64_t u = 0; u < units; u += W) {
      const int n = static_cast<int>(at_most(W, units - u));
      U rows[W];
      for (int i = 0; i < W; ++i)
        rows[i] = slots[i] < 0 ? u_zero() : u_load_first(key + slots[i] * source.key_slot + u * kUnit<T>, n);
      u_transpose(rows);
      for (int i = 0; i < n; ++i) u_store(panel + (u + i) * P * 4, rows[i]);
    }

    for (int i = 0; i < W; i += kUnit<T>) {
      const int j = kUnit<T> == 2 ? i + 1 : i;
      const T* a = slots[i] < 0 ? nullptr : value + slots[i] * source.value_slot;
      const T* b = slots[j] < 0 ? a : value + slots[j] * source.value_slot;  // past the end: its weight is 0
      for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t begin = panels.first(p), width = panels.first(p + 1) - begin;
        char* to = packed_values + (begin * (all_keys / kUnit<T>) + (k + i) / kUnit<T> * width) * W * 4;
        for (int64_t v = 0; v < width; ++v) {
          const int64_t at = (begin + v) * W;
          const int n = static_cast<int>(at_most(W, args.dv - at));
          u_store(to + v * W * 4, a ? row_units(a + at, b + at, n) : u_zero());
        }
      }
    }
  }
}

// c[M, N * W] (row stride ldc) = alpha[m] * c + a[M, units] (row stride lda, in units) * b[units, N * W].
template <typename T, int M, int N, bool kAdd>
static inline void tile(const uint32_t* a, int64_t lda, const char* b, int64_t units, float* c, int64_t ldc,
                        const float* alpha) {
  F acc[M][N];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      acc[m][n] = kAdd ? f_mul(f_load(c + m * ldc + n * W), f_set(alpha[m])) : f_set(0.0f);
  for (int64_t u = 0; u < units; ++u) {
    U column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = u_load(b + (u * N + n) * W * 4);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const U row = u_set(a[m * lda + u]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = madd<T>(acc[m][n], row, column[n]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) f_store(c + m * ldc + n * W, acc[m][n]);
}

template <typename T, int N, bool kAdd>
static void tiles(const uint32_t* a, int64_t lda, const char* b, int64_t units, float* c, int64_t ldc,
                  const float* alpha, int64_t rows) {
  int64_t r = 0;
  for (; r + MR <= rows; r += MR) tile<T, MR, N, kAdd>(a + r * lda, lda, b, units, c + r * ldc, ldc, alpha + r);
  for (; r + 2 <= rows; r += 2) tile<T, 2, N, kAdd>(a + r * lda, lda, b, units, c + r * ldc, ldc, alpha + r);
  if (r < rows) tile<T, 1, N, kAdd>(a + r * lda, lda, b, units, c + r * ldc, ldc, alpha + r);
}

// `tiles` for a panel of so many vectors; `alpha` is read only where c is added to.
template <typename T, bool kAdd>
static void panel_tiles(int64_t vectors, const uint32_t* a, int64_t lda, const char* b, int64_t units, float* c,
                        int64_t ldc, const float* alpha, int64_t rows) {
  static_assert(NR <= 4);
  if (vectors == 1) return tiles<T, 1, kAdd>(a, lda, b, units, c, ldc, alpha, rows);
  if constexpr (NR >= 2)
    if (vectors == 2) return tiles<T, 2, kAdd>(a, lda, b, units, c, ldc, alpha, rows);
  if constexpr (NR >= 4) {
    if (vectors == 3) return tiles<T, 3, kAdd>(a, lda, b, units, c, ldc, alpha, rows);
    return tiles<T, 4, kAdd>(a, lda, b, units, c, ldc, alpha, rows);
  }
}

// What one call works in; all parts start at multiples of 64 bytes.
template <typename T>
struct FlashScratch {
  static constexpr int64_t kScores = kFlashRows * kBlockKeys * 4;
  int64_t query_units, out_width;
  uint32_t* query;  // [rows, query_units]
  float* scores;    // [rows, kBlockKeys]
  uint32_t* weights;  // [rows, kBlockKeys / kUnit]
  float* out;         // [rows, out_width]
  float *top, *sum, *alpha;  // [rows]

  FlashScratch(const AttentionArgs& args, char* at)
      : query_units(args.d / kUnit<T>), out_width(Panels(args.dv).vectors * W) {
    scores = reinterpret_cast<float*>(at);
    weights = reinterpret_cast<uint32_t*>(at += kScores);
    out = reinterpret_cast<float*>(at += kScores / kUnit<T>);
    top = reinterpret_cast<float*>(at += kFlashRows * out_width * 4);
    sum = top + kFlashRows;
    alpha = sum + kFlashRows;
    query = reinterpret_cast<uint32_t*>(at + 3 * kFlashRows * 4);
  }
  static int64_t bytes(const AttentionArgs& args) {
    const int64_t fixed = kScores + kScores / kUnit<T> + 3 * kFlashRows * 4;
    return ceil_div(fixed + kFlashRows * 4 * (args.d / kUnit<T> + Panels(args.dv).vectors * W), 64) * 64;
  }
};

template <typename T>
static int64_t flash_scratch(const AttentionArgs& args) {
  return FlashScratch<T>::bytes(args);
}

// Scores of one row -> weights, and the row's running maximum and sum. Keys begin .. end of the block are seen.
template <typename T>
static inline void soften(float* scores, T* weights, int64_t begin, int64_t end, int64_t width, float scale, float cap,
                          float* top, float* sum, float* alpha) {
  *alpha = 1.0f;
  if (begin >= end) {
    for (int64_t i = 0; i < width; i += W) e_store(weights + i, f_set(0.0f));
    return;
  }
  for (int64_t i = 0; i < begin; ++i) scores[i] = -__builtin_inff();
  for (int64_t i = end; i < width; ++i) scores[i] = -__builtin_inff();
  float to_exponent = scale * kLog2e;
  if (cap > 0.0f) {
    for (int64_t i = begin / W * W; i < end; i += W) {
      F capped = f_mul(f_set(cap), f_tanh(f_mul(f_load(scores + i), f_set(scale / cap))));
      if (i < begin || i + W > end) {
        float lanes[W];
        f_store(lanes, capped);
        for (int j = 0; j < W; ++j)
          if (i + j < begin || i + j >= end) lanes[j] = -__builtin_inff();
        capped = f_load(lanes);
      }
      f_store(scores + i, capped);
    }
    to_exponent = kLog2e;
  }
  F most = f_load(scores);
  for (int64_t i = W; i < width; i += W) most = f_max(most, f_load(scores + i));
  const float here = f_top(most) * to_exponent;
  const float new_top = here > *top ? here : *top;
  *alpha = __builtin_exp2f(*top - new_top);
  const F minus = f_set(-new_top), factor = f_set(to_exponent);
  F total = f_set(0.0f);
  for (int64_t i = 0; i < width; i += W) {
    const F exponent = f_fma(f_load(scores + i), factor, minus);
    const F weight = sizeof(T) == 2 ? f_exp2_coarse(exponent) : f_exp2(exponent);
    total = f_add(total, weight);
    e_store(weights + i, weight);
  }
  *top = new_top;
  *sum = *sum * *alpha + f_sum(total);
}

// Rows row_begin .. row_end of the job's num_tokens * group rows: at most kFlashRows.
template <typename T>
static void flash_rows(const AttentionArgs& args, const FlashJob& job, int64_t row_begin, int64_t row_end,
                       void* scratch_) {
  const FlashScratch<T> at(args, static_cast<char*>(scratch_));
  const int64_t rows = row_end - row_begin, group = args.group, units = at.query_units;
  int64_t lo[kFlashRows], hi[kFlashRows];
  int64_t first_key = job.num_keys, last_key = 0;

  const T* query = static_cast<const T*>(args.query);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = job.first_token + (row_begin + r) / group;
    const int64_t head = job.kv_head * group + (row_begin + r) % group;
    __builtin_memcpy(at.query + r * units, query + token * args.query_token + head * args.query_head,
                     static_cast<size_t>(units) * 4);
    lo[r] = args.lo ? args.lo[token] : 0;
    hi[r] = args.hi ? at_most(args.hi[token], job.num_keys) : job.num_keys;
    if (lo[r] < first_key) first_key = lo[r];
    if (hi[r] > last_key) last_key = hi[r];
    at.top[r] = -__builtin_inff();
    at.sum[r] = 0.0f;
  }
  for (int64_t i = 0; i < rows * at.out_width; i += W) f_store(at.out + i, f_set(0.0f));

  const Panels panels(args.dv);
  const int64_t all_keys = padded_keys(job.num_keys);
  const char* packed_keys = static_cast<const char*>(job.keys);
  const char* packed_values = static_cast<const char*>(job.values);
  for (int64_t start = first_key / P * P; start < last_key; start += kBlockKeys) {
    const int64_t width = padded_keys(at_most(kBlockKeys, last_key - start));
    for (int64_t k = 0; k < width; k += P)
      tiles<T, NR, false>(at.query, units, packed_keys + (start + k) * units * 4, units, at.scores + k, kBlockKeys,
                          at.alpha, rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = lo[r] > start ? lo[r] - start : 0, end = at_most(hi[r] - start, width);
      soften<T>(at.scores + r * kBlockKeys, reinterpret_cast<T*>(at.weights + r * (kBlockKeys / kUnit<T>)), begin, end,
                width, args.scale, args.soft_cap, at.top + r, at.sum + r, at.alpha + r);
    }
    for (int64_t p = 0; p < panels.count; ++p) {
      const int64_t begin = panels.first(p), vectors = panels.first(p + 1) - begin;
      const char* values =
          packed_values + (begin * (all_keys / kUnit<T>) + start / kUnit<T> * vectors) * W * 4;
      panel_tiles<T, true>(vectors, at.weights, kBlockKeys / kUnit<T>, values, width / kUnit<T>, at.out + begin * W,
                    at.out_width, at.alpha, rows);
    }
  }

  T* out = static_cast<T*>(args.out);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = job.first_token + (row_begin + r) / group;
    const int64_t head = job.kv_head * group + (row_begin + r) % group;
    T* to = out + token * args.out_token + head * args.out_head;
    const F share = f_set(at.sum[r] > 0.0f ? 1.0f / at.sum[r] : 0.0f);
    for (int64_t i = 0; i < args.dv; i += W)
      e_store_first(to + i, f_mul(f_load(at.out + r * at.out_width + i), share),
                    static_cast<int>(at_most(W, args.dv - i)));
  }
}
