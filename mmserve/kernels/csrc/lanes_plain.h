// Eight lanes of 32 bits in the compiler's own vectors: any processor. The vocabulary is that of lanes_avx512.h.
#pragma once

constexpr int W = 8;
constexpr int NR = 1;
typedef float F __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));

LANES F f_set(float x) { return F{x, x, x, x, x, x, x, x}; }
LANES F f_load(const float* p) {
  F x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
LANES void f_store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
LANES F f_add(F a, F b) { return a + b; }
LANES F f_sub(F a, F b) { return a - b; }
LANES F f_mul(F a, F b) { return a * b; }
LANES F f_div(F a, F b) { return a / b; }
LANES F f_max(F a, F b) { return a > b ? a : b; }
LANES F f_min(F a, F b) { return a < b ? a : b; }
LANES F f_fma(F a, F b, F c) { return a * b + c; }
LANES float f_sum(F x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
LANES float f_top(F x) {
  float top = x[0];
  for (int i = 1; i < W; ++i) top = x[i] > top ? x[i] : top;
  return top;
}
LANES F f_round(F x) {
  for (int i = 0; i < W; ++i) x[i] = __builtin_rintf(x[i]);
  return x;
}
LANES F f_scale2(F x, F n) {
  for (int i = 0; i < W; ++i) {
    const int32_t power = static_cast<int32_t>(n[i]);
    const uint32_t bits = static_cast<uint32_t>(power + 127) << 23;
    float factor;
    __builtin_memcpy(&factor, &bits, sizeof factor);
    x[i] = power >= -126 ? x[i] * factor : 0.0f;
  }
  return x;
}

LANES U u_zero() { return U{}; }
LANES U u_load(const void* p) {
  U x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
LANES U u_load_first(const void* p, int n) {
  U x = {};
  for (int i = 0; i < n; ++i) {
    uint32_t unit;
    __builtin_memcpy(&unit, static_cast<const char*>(p) + 4 * i, sizeof unit);
    x[i] = unit;
  }
  return x;
}
LANES void u_store(void* p, U x) { __builtin_memcpy(p, &x, sizeof x); }
LANES F f_from(U x) { return (F)x; }  // the same bits
LANES U u_set(uint32_t x) { return U{x, x, x, x, x, x, x, x}; }

LANES F high_half(U x) { return (F)(x & 0xffff0000u); }
LANES F low_half(U x) { return (F)(x << 16); }

template <typename T>
F madd(F acc, U a, U b);
template <>
LANES F madd<Bf16>(F acc, U a, U b) {
  return low_half(a) * low_half(b) + (high_half(a) * high_half(b) + acc);
}
template <>
LANES F madd<float>(F acc, U a, U b) {
  return (F)a * (F)b + acc;
}

LANES F e_load_first(const float* p, int n) { return (F)u_load_first(p, n); }
LANES F e_load_first(const Bf16* p, int n) {
  U x = {};
  for (int i = 0; i < n; ++i) x[i] = static_cast<uint32_t>(p[i].bits) << 16;
  return (F)x;
}
template <typename T>
LANES F e_load(const T* p) {
  return e_load_first(p, W);
}
LANES void e_store_first(float* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}
LANES void e_store_first(Bf16* p, F x, int n) {  // to the nearest bf16, ties to even; a NaN stays one
  const U bits = (U)x;
  for (int i = 0; i < n; ++i) {
    const uint32_t rounded = (bits[i] + 0x7fffu + ((bits[i] >> 16) & 1u)) >> 16;
    p[i].bits = static_cast<uint16_t>((bits[i] & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}
LANES void e_store(float* p, F x) { f_store(p, x); }
LANES void e_store(Bf16* p, F x) { e_store_first(p, x, W); }

LANES U row_units(const float* a, const float*, int n) { return u_load_first(a, n); }
LANES U row_units(const Bf16* a, const Bf16* b, int n) {
  U x = {};
  for (int i = 0; i < n; ++i) x[i] = a[i].bits | static_cast<uint32_t>(b[i].bits) << 16;
  return x;
}

LANES F f_sums(const F (&x)[W]) {
  F sums;
  for (int i = 0; i < W; ++i) sums[i] = f_sum(x[i]);
  return sums;
}

LANES void u_transpose(U (&x)[W]) {
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t swapped = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = swapped;
    }
}
