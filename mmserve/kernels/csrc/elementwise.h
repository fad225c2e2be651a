// The small things between the products: exponential, RMSNorm, gated activation, GELU, rotary embedding, sums.
#pragma once

constexpr float kLog2e = 1.4426950408889634f;

// 2^x to float32 accuracy. A polynomial over [-1/2, 1/2]: the Taylor series of 2^f, its error below 2e-7.
LANES F f_exp2(F x) {
  x = f_max(f_set(-200.0f), x);  // -inf would make inf - inf below; a NaN stays one in this order
  const F n = f_round(x), f = f_sub(x, n);
  F p = f_set(1.5403530e-4f);
  p = f_fma(p, f, f_set(1.3333558e-3f));
  p = f_fma(p, f, f_set(9.6181291e-3f));
  p = f_fma(p, f, f_set(5.5504109e-2f));
  p = f_fma(p, f, f_set(2.4022651e-1f));
  p = f_fma(p, f, f_set(6.9314718e-1f));
  p = f_fma(p, f, f_set(1.0f));
  return f_scale2(p, n);
}

// 2^x for weights that are rounded to bf16 anyway: relative error below 5e-5.
LANES F f_exp2_coarse(F x) {
  x = f_max(f_set(-200.0f), x);
  const F n = f_round(x), f = f_sub(x, n);
  F p = f_set(9.6181291e-3f);
  p = f_fma(p, f, f_set(5.5504109e-2f));
  p = f_fma(p, f, f_set(2.4022651e-1f));
  p = f_fma(p, f, f_set(6.9314718e-1f));
  p = f_fma(p, f, f_set(1.0f));
  return f_scale2(p, n);
}

// 1 / (1 + e^-x). Beyond 87 it is 1 either way, and e^-x a number so small that processors take their time over it.
LANES F f_sigmoid(F x) {
  const F e = f_exp2(f_mul(f_min(f_set(87.0f), f_max(f_set(-88.0f), x)), f_set(-kLog2e)));
  return f_div(f_set(1.0f), f_add(f_set(1.0f), e));
}

// tanh(x) = 2 sigmoid(2x) - 1
LANES F f_tanh(F x) { return f_sub(f_mul(f_set(2.0f), f_sigmoid(f_add(x, x))), f_set(1.0f)); }

template <typename T>
static void rms_norm(const void* x_, const void* weight_, float eps, void* out_, int64_t width) {
  const T *x = static_cast<const T*>(x_), *weight = static_cast<const T*>(weight_);
  T* out = static_cast<T*>(out_);
  F squares = f_set(0.0f);
  int64_t i = 0;
  for (; i + W <= width; i += W) squares = f_fma(e_load<T>(x + i), e_load<T>(x + i), squares);
  const int rest = static_cast<int>(width - i);
  if (rest) squares = f_fma(e_load_first(x + i, rest), e_load_first(x + i, rest), squares);
  const F scale = f_set(1.0f / __builtin_sqrtf(f_sum(squares) / static_cast<float>(width) + eps));
  for (i = 0; i + W <= width; i += W) e_store(out + i, f_mul(f_mul(e_load<T>(x + i), scale), e_load<T>(weight + i)));
  if (rest)
    e_store_first(out + i, f_mul(f_mul(e_load_first(x + i, rest), scale), e_load_first(weight + i, rest)), rest);
}

// The mean first, then the squares of what is left: one pass would lose small deviations from a large mean.
template <typename T>
static void layer_norm(const void* x_, const void* weight_, const void* bias_, float eps, void* out_, int64_t width) {
  const T *x = static_cast<const T*>(x_), *weight = static_cast<const T*>(weight_), *bias = static_cast<const T*>(bias_);
  T* out = static_cast<T*>(out_);
  const int64_t whole = width / W * W;
  const int rest = static_cast<int>(width - whole);
  F sum = f_set(0.0f);
  for (int64_t i = 0; i < whole; i += W) sum = f_add(sum, e_load<T>(x + i));
  if (rest) sum = f_add(sum, e_load_first(x + whole, rest));
  const F mean = f_set(f_sum(sum) / static_cast<float>(width));
  F squares = f_set(0.0f);
  for (int64_t i = 0; i < whole; i += W) {
    const F off = f_sub(e_load<T>(x + i), mean);
    squares = f_fma(off, off, squares);
  }
  float tail[W] = {};
  if (rest) {
    f_store(tail, f_sub(e_load_first(x + whole, rest), mean));
    for (int i = rest; i < W; ++i) tail[i] = 0.0f;
    squares = f_fma(f_load(tail), f_load(tail), squares);
  }
  const F scale = f_set(1.0f / __builtin_sqrtf(f_sum(squares) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < whole; i += W)
    e_store(out + i, f_fma(f_mul(f_sub(e_load<T>(x + i), mean), scale), e_load<T>(weight + i), e_load<T>(bias + i)));
  if (rest)
    e_store_first(out + whole,
                  f_fma(f_mul(f_load(tail), scale), e_load_first(weight + whole, rest), e_load_first(bias + whole, rest)),
                  rest);
}

LANES F silu_times(F gate, F up) { return f_mul(f_mul(gate, f_sigmoid(gate)), up); }

template <typename T>
static void silu_mul(const void* gate_, const void* up_, void* out_, int64_t width) {
  const T *gate = static_cast<const T*>(gate_), *up = static_cast<const T*>(up_);
  T* out = static_cast<T*>(out_);
  int64_t i = 0;
  for (; i + W <= width; i += W) e_store(out + i, silu_times(e_load<T>(gate + i), e_load<T>(up + i)));
  const int rest = static_cast<int>(width - i);
  if (rest) e_store_first(out + i, silu_times(e_load_first(gate + i, rest), e_load_first(up + i, rest)), rest);
}

// x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
LANES F f_gelu(F x) {
  const F cubic = f_fma(f_mul(f_set(0.044715f), f_mul(x, x)), x, x);
  return f_mul(x, f_sigmoid(f_mul(f_set(1.5957691216f), cubic)));
}

template <typename T>
static void gelu_tanh(const void* x_, void* out_, int64_t width) {
  const T* x = static_cast<const T*>(x_);
  T* out = static_cast<T*>(out_);
  int64_t i = 0;
  for (; i + W <= width; i += W) e_store(out + i, f_gelu(e_load<T>(x + i)));
  const int rest = static_cast<int>(width - i);
  if (rest) e_store_first(out + i, f_gelu(e_load_first(x + i, rest)), rest);
}

template <typename T>
static void rotate(const void* x_, const void* cos_, const void* sin_, void* out_, int64_t d) {
  const T *x = static_cast<const T*>(x_), *cos = static_cast<const T*>(cos_), *sin = static_cast<const T*>(sin_);
  T* out = static_cast<T*>(out_);
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i += W) {
    const int n = static_cast<int>(half - i < W ? half - i : W);
    const F low = e_load_first(x + i, n), high = e_load_first(x + half + i, n);
    const F crossed = f_mul(high, e_load_first(sin + i, n));
    e_store_first(out + i, f_sub(f_mul(low, e_load_first(cos + i, n)), crossed), n);
    e_store_first(out + half + i,
                  f_fma(high, e_load_first(cos + half + i, n), f_mul(low, e_load_first(sin + half + i, n))), n);
  }
}

template <typename T>
static void sum(const void* const* parts, int64_t count, void* out_, int64_t begin, int64_t end) {
  T* out = static_cast<T*>(out_);
  int64_t i = begin;
  for (; i + W <= end; i += W) {
    F total = e_load<T>(static_cast<const T*>(parts[0]) + i);
    for (int64_t p = 1; p < count; ++p) total = f_add(total, e_load<T>(static_cast<const T*>(parts[p]) + i));
    e_store(out + i, total);
  }
  const int rest = static_cast<int>(end - i);
  if (!rest) return;
  F total = e_load_first(static_cast<const T*>(parts[0]) + i, rest);
  for (int64_t p = 1; p < count; ++p) total = f_add(total, e_load_first(static_cast<const T*>(parts[p]) + i, rest));
  e_store_first(out + i, total, rest);
}
