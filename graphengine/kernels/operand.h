// How rows of activations meet weights of a stored type in a product.
//
// As floats, a lane one product; or, where the CPU multiplies pairs of bf16 (AVX512_BF16), rounded to bf16
// as the weights are, a lane two products. Sums are float either way. Owns the rounding and the vectors.
#pragma once
#include <vector>

#include "vec.h"

template <typename W>
struct Operand {
  using Value = float;
  using Vector = vf;
  static constexpr int64_t kStep = VL;  // products of a pair (row, weight row) that a vector takes
  template <typename T>
  static ALWAYS_INLINE Vector load(const T* p) {
    return in_register(vload(p));
  }
  static ALWAYS_INLINE vf multiply_add(Vector w, Vector x, vf sum) { return vfma(w, x, sum); }
  static const Value* stage(const float* x, int64_t) { return x; }
};

#if defined(__AVX512BF16__)
template <>
struct Operand<bf16> {
  using Value = bf16;
  using Vector = __m512bh;
  static constexpr int64_t kStep = 2 * VL;
  static ALWAYS_INLINE Vector load(const bf16* p) {
    __m512i v = _mm512_loadu_si512(p);
    asm("" : "+v"(v));  // as in_register
    return (Vector)v;
  }
  static ALWAYS_INLINE vf multiply_add(Vector w, Vector x, vf sum) {
    return _mm512_dpbf16_ps(sum, w, x);
  }
  // The values as bf16, in room of this thread's that lasts until the next call.
  static const Value* stage(const float* x, int64_t count) {
    static thread_local std::vector<bf16> room;
    if (static_cast<int64_t>(room.size()) < count) room.resize(count);
    for (int64_t i = 0; i < count; i += VL) {
      auto rounded = [&](vf v) { return (__m256i)_mm512_cvtneps_pbh(v); };
      if (count - i >= VL) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(room.data() + i), rounded(vload(x + i)));
      } else {
        __mmask16 rest = static_cast<__mmask16>((1u << (count - i)) - 1);
        __m256i v = rounded(_mm512_maskz_loadu_ps(rest, x + i));
        _mm256_mask_storeu_epi16(room.data() + i, rest, v);
      }
    }
    return room.data();
  }
};
#endif
