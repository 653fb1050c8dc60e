// Native-width float vectors: 16 lanes (AVX512F), 8 (AVX2 + FMA) or 4 (portable GCC/Clang vectors).
//
// Owns loads, stores, arithmetic, horizontal sums and exp. Every fused multiply-add is explicit and
// every reduction has one fixed tree, so a result never depends on which lane or tile computed it.
// Knows nothing of tensors. Build with -ffp-contract=off.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

using bf16 = uint16_t;

static ALWAYS_INLINE float to_float(float v) { return v; }
static ALWAYS_INLINE float to_float(bf16 v) {
  uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
static ALWAYS_INLINE void from_float(float v, float* out) { *out = v; }
// Round to nearest even; a NaN stays a NaN (its low payload bits are dropped).
static ALWAYS_INLINE void from_float(float v, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40u;
  *out = static_cast<bf16>((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

#if defined(__AVX512F__)
constexpr int VL = 16;
using vf = __m512;
static ALWAYS_INLINE vf vzero() { return _mm512_setzero_ps(); }
static ALWAYS_INLINE vf vset(float v) { return _mm512_set1_ps(v); }
static ALWAYS_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
static ALWAYS_INLINE vf vload(const bf16* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static ALWAYS_INLINE void vstore(float* p, vf v) { _mm512_storeu_ps(p, v); }
static ALWAYS_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
static ALWAYS_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static ALWAYS_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static ALWAYS_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
static ALWAYS_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static ALWAYS_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static ALWAYS_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static ALWAYS_INLINE vf vzero_below(vf x, vf bound, vf v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), _mm512_setzero_ps());
}
static ALWAYS_INLINE vf vpow2(vf shifted) {
  __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3F800000)));
}
static ALWAYS_INLINE __m256 fold_half(vf v) {
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(v), high);
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int VL = 8;
using vf = __m256;
static ALWAYS_INLINE vf vzero() { return _mm256_setzero_ps(); }
static ALWAYS_INLINE vf vset(float v) { return _mm256_set1_ps(v); }
static ALWAYS_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
static ALWAYS_INLINE vf vload(const bf16* p) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static ALWAYS_INLINE void vstore(float* p, vf v) { _mm256_storeu_ps(p, v); }
static ALWAYS_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
static ALWAYS_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static ALWAYS_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static ALWAYS_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
static ALWAYS_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static ALWAYS_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static ALWAYS_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static ALWAYS_INLINE vf vzero_below(vf x, vf bound, vf v) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, bound, _CMP_LT_OQ), v);
}
static ALWAYS_INLINE vf vpow2(vf shifted) {
  __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3F800000)));
}
static ALWAYS_INLINE __m256 fold_half(vf v) { return v; }
#else
constexpr int VL = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
static ALWAYS_INLINE vf vset(float v) { return vf{v, v, v, v}; }
static ALWAYS_INLINE vf vzero() { return vset(0.0f); }
static ALWAYS_INLINE vf vload(const float* p) {
  vf v;
  std::memcpy(&v, p, 16);
  return v;
}
static ALWAYS_INLINE vf vload(const bf16* p) {
  return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
static ALWAYS_INLINE void vstore(float* p, vf v) { std::memcpy(p, &v, 16); }
static ALWAYS_INLINE vf vadd(vf a, vf b) { return a + b; }
static ALWAYS_INLINE vf vsub(vf a, vf b) { return a - b; }
static ALWAYS_INLINE vf vmul(vf a, vf b) { return a * b; }
static ALWAYS_INLINE vf vdiv(vf a, vf b) { return a / b; }
static ALWAYS_INLINE vf vfma(vf a, vf b, vf c) {
  for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
// Like the x86 instructions: the second operand where either is a NaN.
static ALWAYS_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
static ALWAYS_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
static ALWAYS_INLINE vf vzero_below(vf x, vf bound, vf v) { return x < bound ? vzero() : v; }
static ALWAYS_INLINE vf vpow2(vf shifted) {
  vi bits;
  std::memcpy(&bits, &shifted, 16);
  bits = (bits << 23) + 0x3F800000;
  std::memcpy(&shifted, &bits, 16);
  return shifted;
}
static ALWAYS_INLINE float vsum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
#endif

#if defined(__AVX2__) && defined(__FMA__)
// The one tree of a horizontal sum: halves are added until one lane is left.
static ALWAYS_INLINE float vsum(vf v) {
  __m256 h = fold_half(v);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  s = _mm_add_ss(s, _mm_shuffle_ps(s, s, 1));
  return _mm_cvtss_f32(s);
}
#endif

// The horizontal sums of four vectors, each by the tree of vsum.
static ALWAYS_INLINE void vsum4(vf a, vf b, vf c, vf d, float* out) {
#if defined(__AVX2__) && defined(__FMA__)
  auto quarter = [](vf v) __attribute__((always_inline)) {
    __m256 h = fold_half(v);
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  };
  __m128 qa = quarter(a), qb = quarter(b), qc = quarter(c), qd = quarter(d);
  __m128 ab = _mm_add_ps(_mm_movelh_ps(qa, qb), _mm_movehl_ps(qb, qa));
  __m128 cd = _mm_add_ps(_mm_movelh_ps(qc, qd), _mm_movehl_ps(qd, qc));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xDD)));
#else
  out[0] = vsum(a);
  out[1] = vsum(b);
  out[2] = vsum(c);
  out[3] = vsum(d);
#endif
}

// Keeps a loaded value in a register: GCC would rather read it again in every FMA that uses it.
static ALWAYS_INLINE vf in_register(vf v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX2__)
  asm("" : "+x"(v));
#endif
  return v;
}

// Partial vectors (count < VL): absent lanes read as `fill` and are not written.
static ALWAYS_INLINE vf vload_part(const float* p, int64_t count, float fill = 0.0f) {
  alignas(64) float lanes[VL];
  for (int64_t i = 0; i < VL; i++) lanes[i] = i < count ? p[i] : fill;
  return vload(lanes);
}
static ALWAYS_INLINE void vstore_part(float* p, vf v, int64_t count) {
  alignas(64) float lanes[VL];
  vstore(lanes, v);
  for (int64_t i = 0; i < count; i++) p[i] = lanes[i];
}

static ALWAYS_INLINE float vhmax(vf v) {
  alignas(64) float lanes[VL];
  vstore(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < VL; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// exp after Cephes' expf: about 1 ulp on [-87.3, 88.3], 0 below, saturated above, NaN stays NaN.
static ALWAYS_INLINE vf vexp(vf x) {
  const vf low = vset(-87.33654f), high = vset(88.376259f), magic = vset(12582912.0f);
  vf c = vmin(high, vmax(low, x));
  vf shifted = vfma(c, vset(1.44269504088896341f), magic);  // low bits hold round(x / ln 2)
  vf n = vsub(shifted, magic);
  vf r = vfma(n, vset(-0.693359375f), c);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vfma(p, vmul(r, r), r);
  p = vadd(p, vset(1.0f));
  return vzero_below(x, low, vmul(p, vpow2(shifted)));
}
static ALWAYS_INLINE float exp_scalar(float x) {
  alignas(64) float lanes[VL];
  vstore(lanes, vexp(vset(x)));
  return lanes[0];
}
