// Attention of one query a sequence, all heads of a group at once over a split of the keys.
//
// Keys and values are read where they lie, each once: a step is bound by that. The splits have a fixed length,
// so a sequence's result is the same whatever else is in its batch and however many threads there are.
#pragma once

constexpr int64_t kAhead = 2 * W;   // keys between the one that is read and the one that is asked for
constexpr int64_t kMaxGroup = 8;  // query heads of one pass; larger groups take several

// dots[i] of one query with W keys; keys[i] may repeat.
template <typename T>
static inline F dots(const T* query, const T* const (&keys)[W], int64_t units) {
  F acc[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) acc[i] = f_set(0.0f);
  int64_t u = 0;
  for (; u + W <= units; u += W) {
    const U q = u_load(query + u * kUnit<T>);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) acc[i] = madd<T>(acc[i], u_load(keys[i] + u * kUnit<T>), q);
  }
  if (const int rest = static_cast<int>(units - u)) {
    const U q = u_load_first(query + u * kUnit<T>, rest);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) acc[i] = madd<T>(acc[i], u_load_first(keys[i] + u * kUnit<T>, rest), q);
  }
  return f_sums(acc);
}

LANES uint32_t unit_at(const float* weights, int64_t key) {
  uint32_t unit;
  __builtin_memcpy(&unit, weights + key, 4);
  return unit;
}
LANES uint32_t unit_at(const Bf16* weights, int64_t key) {
  uint32_t unit;
  __builtin_memcpy(&unit, weights + key, 4);
  return unit;
}

// out[g, at .. at + n] += weights[g] * values, for G heads; `values` are the rows of `count` keys.
template <typename T, int G>
static inline void weigh(const T* weights, const T* const* values, int64_t count, int64_t at, int n, float* out,
                         int64_t out_stride) {
  F acc[G];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) acc[g] = f_set(0.0f);
  for (int64_t k = 0; k < count; k += kUnit<T>) {
    // An odd last key is paired with itself; its partner's weight is 0.
    const U rows = row_units(values[k] + at, values[k + kUnit<T> - 1] + at, n);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) acc[g] = madd<T>(acc[g], rows, u_set(unit_at(weights + g * kDecodeSplit, k)));
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) f_store(out + g * out_stride + at, acc[g]);
}

template <typename T>
static void weigh_group(int64_t heads, const T* weights, const T* const* values, int64_t count, int64_t dv, float* out,
                        int64_t out_stride) {
  for (int64_t at = 0; at < dv; at += W) {
    const int n = static_cast<int>(at_most(W, dv - at));
    int64_t g = 0;
    for (; g + 4 <= heads; g += 4)
      weigh<T, 4>(weights + g * kDecodeSplit, values, count, at, n, out + g * out_stride, out_stride);
    for (; g + 3 <= heads; g += 3)
      weigh<T, 3>(weights + g * kDecodeSplit, values, count, at, n, out + g * out_stride, out_stride);
    for (; g < heads; ++g)
      weigh<T, 1>(weights + g * kDecodeSplit, values, count, at, n, out + g * out_stride, out_stride);
  }
}

constexpr int64_t kMaxValue = 512 + W;  // widest Dv, and the lanes that a last vector writes past it

template <typename T>
static void store_head(const AttentionArgs& args, const DecodeJob& job, int64_t head, const float* row, float share) {
  T* out = static_cast<T*>(args.out) + job.token * args.out_token + head * args.out_head;
  for (int64_t i = 0; i < args.dv; i += W) {
    const int n = static_cast<int>(at_most(W, args.dv - i));
    e_store_first(out + i, f_mul(e_load_first(row + i, n), f_set(share)), n);
  }
}

// Asks for the lines of W rows of `width` elements. The hardware's own prefetchers follow neither a block table nor
// rows that lie a few lines apart, and without this the memory waits for the arithmetic as often as the other way round.
template <typename T>
LANES void fetch_rows(const T* const* rows, int64_t width) {
  for (int j = 0; j < W; ++j)
    for (int64_t at = 0; at < width; at += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(rows[j] + at, 0, 2);
}

template <typename T>
static void decode_heads(const AttentionArgs& args, const DecodeJob& job, int64_t head0, int64_t heads) {
  const KeySource& source = job.source;
  const int64_t count = job.end - job.begin, units = args.d / kUnit<T>;
  const T* keys[kDecodeSplit + W];
  const T* values[kDecodeSplit + W];
  const T* key = static_cast<const T*>(source.key) + job.kv_head * source.key_head;
  const T* value = static_cast<const T*>(source.value) + job.kv_head * source.value_head;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = slot_of(source, job.begin + i);
    keys[i] = key + slot * source.key_slot;
    values[i] = value + slot * source.value_slot;
  }
  for (int64_t i = count; i < count + W; ++i) {  // a last vector of keys reads the last key again
    keys[i] = keys[count - 1];
    values[i] = values[count - 1];
  }

  alignas(64) float scores[kDecodeSplit + W];
  alignas(64) T weights[kMaxGroup * kDecodeSplit];
  alignas(64) float out[kMaxGroup * kMaxValue];
  float tops[kMaxGroup], sums[kMaxGroup];
  const T* query = static_cast<const T*>(args.query) + job.token * args.query_token;
  const int64_t width = ceil_div(count, W) * W;
  for (int64_t g = 0; g < heads; ++g) {
    const T* row = query + (job.kv_head * args.group + head0 + g) * args.query_head;
    const bool fetches_keys = g == 0, fetches_values = g == (heads > 1 ? 1 : 0);
    for (int64_t i = 0; i < count; i += W) {
      if (fetches_keys && i + kAhead < count) fetch_rows(keys + i + kAhead, args.d);
      if (fetches_values) fetch_rows(values + i, args.dv);
      const T* some[W];
      for (int j = 0; j < W; ++j) some[j] = keys[i + j];
      f_store(scores + i, dots<T>(row, some, units));
    }
    float unused;
    tops[g] = -__builtin_inff();
    sums[g] = 0.0f;
    soften<T>(scores, weights + g * kDecodeSplit, 0, count, width, args.scale, args.soft_cap, tops + g, sums + g,
              &unused);
  }
  const int64_t stride = ceil_div(args.dv, W) * W;
  weigh_group<T>(heads, weights, values, count, args.dv, out, stride);
  for (int64_t g = 0; g < heads; ++g) {
    if (!job.partial) {
      store_head<T>(args, job, job.kv_head * args.group + head0 + g, out + g * stride, 1.0f / sums[g]);
      continue;
    }
    float* to = job.partial + (head0 + g) * (args.dv + 2);
    __builtin_memcpy(to, out + g * stride, static_cast<size_t>(args.dv) * 4);
    to[args.dv] = tops[g];
    to[args.dv + 1] = sums[g];
  }
}

template <typename T>
static void decode(const AttentionArgs& args, const DecodeJob& job) {
  for (int64_t head = 0; head < args.group; head += kMaxGroup)
    decode_heads<T>(args, job, head, at_most(kMaxGroup, args.group - head));
}

// The splits of one (sequence, key head), in order, into one result.
template <typename T>
static void decode_merge(const AttentionArgs& args, const DecodeJob* splits, int64_t count) {
  for (int64_t g = 0; g < args.group; ++g) {
    const int64_t row = g * (args.dv + 2);
    float top = -__builtin_inff(), sum = 0.0f;
    for (int64_t s = 0; s < count; ++s) {
      const float here = splits[s].partial[row + args.dv];
      top = here > top ? here : top;
    }
    float merged[kMaxValue] = {};
    for (int64_t s = 0; s < count; ++s) {
      const float* part = splits[s].partial + row;
      const float factor = __builtin_exp2f(part[args.dv] - top);
      sum += factor * part[args.dv + 1];
      for (int64_t i = 0; i < args.dv; ++i) merged[i] += factor * part[i];
    }
    store_head<T>(args, splits[0], splits[0].kv_head * args.group + g, merged, 1.0f / sum);
  }
}
