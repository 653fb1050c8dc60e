// The one dot product: out[m][n] = x[m] . w[n], row-major both.
//
// One VL-wide accumulator a pair (m, n), k ascending; one horizontal sum; the tail of K by scalar fma.
// A pair's arithmetic is the same in every tile shape: that is what makes a row independent of M.
#pragma once
#include "vec.h"

template <typename W, int NR, int MR, int PREFETCH, class Sink>
static ALWAYS_INLINE void dot_tile(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t K,
                                   const Sink& sink) {
  vf acc[NR][MR];
  for (int n = 0; n < NR; n++)
    for (int m = 0; m < MR; m++) acc[n][m] = vzero();
  int64_t k = 0;
  for (; k + VL <= K; k += VL) {
    vf wv[NR];
#pragma GCC unroll 16
    for (int n = 0; n < NR; n++) {
      const W* p = w + n * ldw + k;
      wv[n] = vload(p);
      if (PREFETCH > 0) __builtin_prefetch(reinterpret_cast<const char*>(p) + PREFETCH);
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      vf xv = vload(x + m * ldx + k);
#pragma GCC unroll 16
      for (int n = 0; n < NR; n++) acc[n][m] = vfma(wv[n], xv, acc[n][m]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int n = 0; n < NR; n++) {
      float s = vsum(acc[n][m]);
      for (int64_t t = k; t < K; t++)
        s = __builtin_fmaf(to_float(w[n * ldw + t]), x[m * ldx + t], s);
      sink(m, n, s);
    }
}
