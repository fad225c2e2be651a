// flash.h for the matrix units: the same jobs and the same masks, scores and outputs in tiles of 16 by 16.
//
//     packed keys    [16 keys][32 of D, the last padded with zeros] tiles of [unit of D][key]
//     packed values  [32 keys][16 of Dv] tiles of [unit of keys][of Dv]
// Scores of a block become weights in place: a row's weights lie at the beginning of its scores.
#pragma once

constexpr int64_t kMatrixKeys = 256;  // keys scored at once
constexpr float kLowest = -1e30f;     // below every maximum, and finite: the difference of two is a number

LANES int64_t key_steps(const AttentionArgs& args) { return ceil_div(args.d, kTileSteps); }
LANES int64_t value_tiles(const AttentionArgs& args) { return ceil_div(args.dv, W); }

static PackSizes matrix_flash_sizes(const AttentionArgs& args, int64_t num_keys) {
  const int64_t keys = padded_keys(num_keys);
  return {keys / W * key_steps(args) * kTile, keys / kTileSteps * value_tiles(args) * kTile};
}

static void matrix_flash_pack(const AttentionArgs& args, const FlashJob& job, int64_t key_begin, int64_t key_end) {
  const KeySource& source = job.source;
  const Bf16* key = static_cast<const Bf16*>(source.key) + job.kv_head * source.key_head;
  const Bf16* value = static_cast<const Bf16*>(source.value) + job.kv_head * source.value_head;
  const int64_t units = args.d / 2, steps = key_steps(args), across = value_tiles(args);
  char* packed_keys = static_cast<char*>(job.keys);
  char* packed_values = static_cast<char*>(job.values);
  for (int64_t k = key_begin; k < padded_keys(key_end); k += W) {
    int64_t slots[W];
    for (int i = 0; i < W; ++i) slots[i] = k + i < job.num_keys ? slot_of(source, k + i) : -1;
    for (int64_t s = 0; s < steps; ++s) {
      const int n = static_cast<int>(at_most(W, units - s * W));
      U rows[W];
      for (int i = 0; i < W; ++i)
        rows[i] = slots[i] < 0 ? u_zero() : u_load_first(key + slots[i] * source.key_slot + s * kTileSteps, n);
      u_transpose(rows);
      char* tile = packed_keys + (k / W * steps + s) * kTile;
      for (int i = 0; i < W; ++i) u_store(tile + i * kTileRow, rows[i]);
    }
    for (int i = 0; i < W; i += 2) {
      const Bf16* a = slots[i] < 0 ? nullptr : value + slots[i] * source.value_slot;
      const Bf16* b = slots[i + 1] < 0 ? a : value + slots[i + 1] * source.value_slot;  // past the end: its weight is 0
      char* to = packed_values + k / kTileSteps * across * kTile + (k % kTileSteps + i) / 2 * kTileRow;
      for (int64_t v = 0; v < across; ++v) {
        const int n = static_cast<int>(at_most(W, args.dv - v * W));
        u_store(to + v * kTile, a ? row_units(a + v * W, b + v * W, n) : u_zero());
      }
    }
  }
}

// What one call works in; all parts start at multiples of 64 bytes.
struct MatrixScratch {
  int64_t query_bytes, out_width;  // of a row
  char* query;                     // [rows, steps of D], zeros beyond D
  float* scores;                   // [rows, kMatrixKeys]
  float* out;                      // [rows, out_width]
  float *top, *sum, *alpha;        // [rows]

  LANES MatrixScratch(const AttentionArgs& args, char* at)
      : query_bytes(key_steps(args) * kTileRow), out_width(value_tiles(args) * W) {
    query = at;
    scores = reinterpret_cast<float*>(at += kFlashRows * query_bytes);
    out = reinterpret_cast<float*>(at += kFlashRows * kMatrixKeys * 4);
    top = reinterpret_cast<float*>(at + kFlashRows * out_width * 4);
    sum = top + kFlashRows;
    alpha = sum + kFlashRows;
  }
};
static_assert(kFlashRows % W == 0);

static int64_t matrix_flash_scratch(const AttentionArgs& args) {
  return kFlashRows * (key_steps(args) * kTileRow + (kMatrixKeys + value_tiles(args) * W + 3) * 4);
}

// 2^x for weights that are rounded to bf16 anyway: relative error below 8e-5, 0 for -inf.
LANES F f_exp2_short(F x) {
  const F f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less its floor
  F p = f_set(7.80240306e-2f);
  p = f_fma(p, f, f_set(2.26067072e-1f));
  p = f_fma(p, f, f_set(6.95833993e-1f));
  p = f_fma(p, f, f_set(9.99925125e-1f));
  return _mm512_scalef_ps(p, x);  // by the floor of x
}

// Lane i of the result is the greatest lane of x[i].
LANES F f_tops(F (&x)[W]) {
  U turned[W];
  for (int i = 0; i < W; ++i) turned[i] = _mm512_castps_si512(x[i]);
  u_transpose(turned);
  F most = f_from(turned[0]);
  for (int i = 1; i < W; ++i) most = f_max(most, f_from(turned[i]));
  return most;
}

// The scores of 16 rows -> weights in place, and their running maxima and sums.
// Row i sees keys begin[i] .. end[i] of the block's `width`, a multiple of 32.
LANES void matrix_soften(const AttentionArgs& args, float* scores, const int64_t* begin, const int64_t* end,
                         int64_t width, float* top, float* sum, float* alpha) {
  float to_exponent = args.scale * kLog2e;
  if (args.soft_cap > 0.0f) {
    const F cap = f_set(args.soft_cap), inner = f_set(args.scale / args.soft_cap);
    for (int r = 0; r < W; ++r)
      for (float* at = scores + r * kMatrixKeys; at < scores + r * kMatrixKeys + width; at += W)
        f_store(at, f_mul(cap, f_tanh(f_mul(f_load(at), inner))));
    to_exponent = kLog2e;
  }
  F lanes[W];
  for (int r = 0; r < W; ++r) {
    float* row = scores + r * kMatrixKeys;
    const int64_t stop = end[r] > begin[r] ? end[r] : begin[r];
    for (int64_t i = 0; i < begin[r] && i < width; ++i) row[i] = -__builtin_inff();
    for (int64_t i = stop; i < width; ++i) row[i] = -__builtin_inff();
    F most = f_max(f_load(row), f_load(row + W));
    for (int64_t i = 2 * W; i < width; i += 2 * W) most = f_max(most, f_max(f_load(row + i), f_load(row + i + W)));
    lanes[r] = most;
  }
  const F old = f_load(top), now = f_max(old, f_mul(f_tops(lanes), f_set(to_exponent)));
  const F kept = f_exp2(f_sub(old, now));
  f_store(top, now);
  f_store(alpha, kept);
  const F factor = f_set(to_exponent);
  for (int r = 0; r < W; ++r) {
    const float* row = scores + r * kMatrixKeys;
    uint16_t* weights = reinterpret_cast<uint16_t*>(scores + r * kMatrixKeys);
    const F minus = f_set(-top[r]);
    F low = f_set(0.0f), high = f_set(0.0f);
    for (int64_t i = 0; i < width; i += 2 * W) {
      const F a = f_exp2_short(f_fma(f_load(row + i), factor, minus));
      const F b = f_exp2_short(f_fma(f_load(row + i + W), factor, minus));
      low = f_add(low, a);
      high = f_add(high, b);
      _mm512_storeu_si512(weights + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    lanes[r] = f_add(low, high);
  }
  f_store(sum, f_fma(f_load(sum), kept, f_sums(lanes)));
}

// R * 16 rows against `width` keys of the packed block: scores.
template <int R>
LANES void matrix_scores(const MatrixScratch& at, int64_t row, const char* keys, int64_t steps, int64_t width) {
  const TileRows query = plain_rows(at.query + row * at.query_bytes, at.query_bytes, R * W, at.query_bytes);
  for (int64_t k = 0; k < width; k += 2 * W)
    tile_product<R, 2, false, false>(query, keys + k / W * steps * kTile, kTile, steps * kTile,
                                     at.scores + row * kMatrixKeys + k, kMatrixKeys);
}

// Adds their weights' share of the packed values to out.
template <int R>
LANES void matrix_outputs(const MatrixScratch& at, int64_t row, const char* values, int64_t across, int64_t width) {
  const TileRows weights = plain_rows(at.scores + row * kMatrixKeys, kMatrixKeys * 4, R * W, width * 2);
  float* out = at.out + row * at.out_width;
  int64_t v = 0;
  for (; v + 2 <= across; v += 2)
    tile_product<R, 2, true, false>(weights, values + v * kTile, across * kTile, kTile, out + v * W,
                                    at.out_width);
  if (v < across)
    tile_product<R, 1, true, false>(weights, values + v * kTile, across * kTile, kTile, out + v * W,
                                    at.out_width);
}

// Rows row_begin .. row_end of the job's num_tokens * group rows: at most kFlashRows.
static void matrix_flash_rows(const AttentionArgs& args, const FlashJob& job, int64_t row_begin, int64_t row_end,
                              void* scratch_) {
  const MatrixScratch at(args, static_cast<char*>(scratch_));
  const int64_t rows = row_end - row_begin, tall = ceil_div(rows, W) * W, group = args.group;
  const int64_t steps = key_steps(args), across = value_tiles(args);
  int64_t lo[kFlashRows] = {}, hi[kFlashRows] = {};
  int64_t first_key = job.num_keys, last_key = 0;
  const Bf16* query = static_cast<const Bf16*>(args.query);
  const auto place = [&](int64_t r, int64_t token_stride, int64_t head_stride) LANES_LAMBDA {
    return (job.first_token + (row_begin + r) / group) * token_stride +
           (job.kv_head * group + (row_begin + r) % group) * head_stride;
  };
  for (int64_t r = 0; r < tall; ++r) {
    at.top[r] = kLowest;
    at.sum[r] = 0.0f;
    for (int64_t s = 0; s < steps; ++s) {
      const int n = static_cast<int>(at_most(W, args.d / 2 - s * W));
      const Bf16* from = query + (r < rows ? place(r, args.query_token, args.query_head) : 0) + s * kTileSteps;
      u_store(at.query + r * at.query_bytes + s * kTileRow, r < rows ? u_load_first(from, n) : u_zero());
    }
    if (r >= rows) continue;
    const int64_t token = job.first_token + (row_begin + r) / group;
    lo[r] = args.lo ? args.lo[token] : 0;
    hi[r] = args.hi ? at_most(args.hi[token], job.num_keys) : job.num_keys;
    if (lo[r] < first_key) first_key = lo[r];
    if (hi[r] > last_key) last_key = hi[r];
  }
  for (int64_t i = 0; i < tall * at.out_width; i += W) f_store(at.out + i, f_set(0.0f));

  const TileRegisters registers;
  const char* packed_keys = static_cast<const char*>(job.keys);
  const char* packed_values = static_cast<const char*>(job.values);
  for (int64_t start = first_key / kTileSteps * kTileSteps; start < last_key; start += kMatrixKeys) {
    const int64_t width = ceil_div(at_most(kMatrixKeys, last_key - start), kTileSteps) * kTileSteps;
    const char* keys = packed_keys + start / W * steps * kTile;
    const char* values = packed_values + start / kTileSteps * across * kTile;
    int64_t r = 0;
    for (; r + 2 * W <= tall; r += 2 * W) matrix_scores<2>(at, r, keys, steps, width);
    if (r < tall) matrix_scores<1>(at, r, keys, steps, width);
    for (r = 0; r < tall; r += W) {
      int64_t begin[W], end[W];
      for (int i = 0; i < W; ++i) {
        begin[i] = lo[r + i] > start ? lo[r + i] - start : 0;
        end[i] = at_most(hi[r + i] - start, width);
      }
      matrix_soften(args, at.scores + r * kMatrixKeys, begin, end, width, at.top + r, at.sum + r, at.alpha + r);
      for (int i = 0; i < W; ++i) {
        if (at.alpha[r + i] == 1.0f) continue;
        float* out = at.out + (r + i) * at.out_width;
        for (int64_t v = 0; v < at.out_width; v += W) f_store(out + v, f_mul(f_load(out + v), f_set(at.alpha[r + i])));
      }
    }
    for (r = 0; r + 2 * W <= tall; r += 2 * W) matrix_outputs<2>(at, r, values, across, width);
    if (r < tall) matrix_outputs<1>(at, r, values, across, width);
  }

  for (int64_t r = 0; r < rows; ++r) {
    Bf16* to = static_cast<Bf16*>(args.out) + place(r, args.out_token, args.out_head);
    const F share = f_set(at.sum[r] > 0.0f ? 1.0f / at.sum[r] : 0.0f);
    for (int64_t i = 0; i < args.dv; i += W)
      e_store_first(to + i, f_mul(f_load(at.out + r * at.out_width + i), share),
                    static_cast<int>(at_most(W, args.dv - i)));
  }
}
