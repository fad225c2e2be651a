// Sixteen lanes of 32 bits: AVX-512 with BF16. The vocabulary that linear.h, flash.h and decode.h are written in.
//
// F is a vector of floats. U is a vector of units: a unit is 32 bits of an operand, one float or two
// neighbouring bf16, and madd(acc, a, b) adds the product of units lane by lane (for bf16: of both pairs).
#pragma once

constexpr int W = 16;   // lanes
constexpr int NR = 4;   // vectors of a tile's columns: 6 x 4 accumulators fill the 32 registers
using F = __m512;
using U = __m512i;

LANES F f_set(float x) { return _mm512_set1_ps(x); }
LANES F f_load(const float* p) { return _mm512_loadu_ps(p); }
LANES void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
LANES F f_add(F a, F b) { return _mm512_add_ps(a, b); }
LANES F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
LANES F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
LANES F f_div(F a, F b) { return _mm512_div_ps(a, b); }
LANES F f_max(F a, F b) { return _mm512_max_ps(a, b); }
LANES F f_min(F a, F b) { return _mm512_min_ps(a, b); }
LANES F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
LANES float f_sum(F x) { return _mm512_reduce_add_ps(x); }
LANES float f_top(F x) { return _mm512_reduce_max_ps(x); }
LANES F f_round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LANES F f_scale2(F x, F n) { return _mm512_scalef_ps(x, n); }  // x * 2^n, n integral

LANES __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
LANES U u_zero() { return _mm512_setzero_si512(); }
LANES U u_load(const void* p) { return _mm512_loadu_si512(p); }
LANES U u_load_first(const void* p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
LANES void u_store(void* p, U x) { _mm512_storeu_si512(p, x); }
LANES F f_from(U x) { return _mm512_castsi512_ps(x); }  // the same bits
LANES U u_set(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }

template <typename T>
F madd(F acc, U a, U b);
template <>
LANES F madd<Bf16>(F acc, U a, U b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
template <>
LANES F madd<float>(F acc, U a, U b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
}

template <typename T>
F e_load(const T* p);
template <>
LANES F e_load<float>(const float* p) {
  return _mm512_loadu_ps(p);
}
template <>
LANES F e_load<Bf16>(const Bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
LANES F e_load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
LANES F e_load_first(const Bf16* p, int n) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
LANES void e_store(float* p, F x) { _mm512_storeu_ps(p, x); }
LANES void e_store(Bf16* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
LANES void e_store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
LANES void e_store_first(Bf16* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), (__m256i)_mm512_cvtneps_pbh(x));
}

// Units of two value rows: lane i holds (a[i], b[i]); for floats there is only `a`. Reads n elements.
LANES U row_units(const float* a, const float*, int n) { return u_load_first(a, n); }
LANES U row_units(const Bf16* a, const Bf16* b, int n) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), a));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Lane i of the result is the sum of the lanes of x[i].
LANES F f_sums(const F (&x)[W]) {
  F pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    pairs[i] = f_add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = f_add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const F low = f_add(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  const F high = f_add(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
  return f_add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// rows[i] lane j <-> rows[j] lane i.
LANES void u_transpose(U (&x)[W]) {
  U a[W], b[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const U low02 = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), low13 = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    const U high02 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    const U high13 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    x[i] = _mm512_shuffle_i32x4(low02, high02, 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(low13, high13, 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
  }
}
