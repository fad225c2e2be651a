// Eight lanes of 32 bits: AVX2 with FMA. The same vocabulary as lanes_avx512.h; a bf16 pair takes two multiplications.
#pragma once

constexpr int W = 8;
constexpr int NR = 2;  // 6 x 2 accumulators and their operands fill the 16 registers
using F = __m256;
using U = __m256i;

LANES F f_set(float x) { return _mm256_set1_ps(x); }
LANES F f_load(const float* p) { return _mm256_loadu_ps(p); }
LANES void f_store(float* p, F x) { _mm256_storeu_ps(p, x); }
LANES F f_add(F a, F b) { return _mm256_add_ps(a, b); }
LANES F f_sub(F a, F b) { return _mm256_sub_ps(a, b); }
LANES F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
LANES F f_div(F a, F b) { return _mm256_div_ps(a, b); }
LANES F f_max(F a, F b) { return _mm256_max_ps(a, b); }
LANES F f_min(F a, F b) { return _mm256_min_ps(a, b); }
LANES F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
LANES float f_sum(F x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
LANES float f_top(F x) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
LANES F f_round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
LANES F f_scale2(F x, F n) {  // x * 2^n; below the smallest normal the result is 0
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const F scaled = _mm256_mul_ps(x, _mm256_castsi256_ps(power));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_GE_OQ));
}

LANES __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
LANES U u_zero() { return _mm256_setzero_si256(); }
LANES U u_load(const void* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
LANES U u_load_first(const void* p, int n) { return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first(n)); }
LANES void u_store(void* p, U x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
LANES F f_from(U x) { return _mm256_castsi256_ps(x); }  // the same bits
LANES U u_set(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }

LANES F high_half(U x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536))); }
LANES F low_half(U x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }

template <typename T>
F madd(F acc, U a, U b);
template <>
LANES F madd<Bf16>(F acc, U a, U b) {
  return _mm256_fmadd_ps(low_half(a), low_half(b), _mm256_fmadd_ps(high_half(a), high_half(b), acc));
}
template <>
LANES F madd<float>(F acc, U a, U b) {
  return _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), acc);
}

LANES __m128i load_halves(const Bf16* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
LANES __m128i load_halves_first(const Bf16* p, int n) {
  Bf16 whole[W] = {};
  for (int i = 0; i < n; ++i) whole[i] = p[i];
  return load_halves(whole);
}
LANES F widen(__m128i halves) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)); }
LANES __m128i narrow(F x) {  // to the nearest bf16, ties to even; a NaN stays one
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i safe = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(safe), _mm256_extracti128_si256(safe, 1));
}

template <typename T>
F e_load(const T* p);
template <>
LANES F e_load<float>(const float* p) {
  return _mm256_loadu_ps(p);
}
template <>
LANES F e_load<Bf16>(const Bf16* p) {
  return widen(load_halves(p));
}
LANES F e_load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
LANES F e_load_first(const Bf16* p, int n) { return widen(load_halves_first(p, n)); }
LANES void e_store(float* p, F x) { _mm256_storeu_ps(p, x); }
LANES void e_store(Bf16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
LANES void e_store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
LANES void e_store_first(Bf16* p, F x, int n) {
  Bf16 whole[W];
  e_store(whole, x);
  for (int i = 0; i < n; ++i) p[i] = whole[i];
}

LANES U row_units(const float* a, const float*, int n) { return u_load_first(a, n); }
LANES U row_units(const Bf16* a, const Bf16* b, int n) {
  const __m128i low = n == W ? load_halves(a) : load_halves_first(a, n);
  const __m128i high = n == W ? load_halves(b) : load_halves_first(b, n);
  return _mm256_or_si256(_mm256_cvtepu16_epi32(low), _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16));
}

LANES F f_sums(const F (&x)[W]) {
  const F low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const F high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return f_add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

LANES void u_transpose(U (&x)[W]) {
  U a[W], b[W];
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < W; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    x[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}
