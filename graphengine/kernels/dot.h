// The one dot product: out[m][n] = x[m] . w[n], row-major both.
//
// One VL-wide accumulator a pair (m, n), k ascending; one horizontal sum; the tail of K by scalar fma.
// A pair's arithmetic is the same in every tile shape: that is what makes a row independent of M.
#pragma once
#include "vec.h"

// The portable vectors have a fused multiply-add a lane: unrolling them costs only compile time.
constexpr int kUnrollLine = VL == 4 ? 1 : 4;

// A walk in address order over memory that will be read soon: `lines` cache lines for each line of
// the tile. A prefetch past the end of anything is harmless.
struct Ahead {
  const char* at;
  int64_t lines;
  ALWAYS_INLINE void step() {
    for (int64_t i = 0; i < lines; i++, at += 64) __builtin_prefetch(at);
  }
};

template <typename W, int NR, int MR>
static ALWAYS_INLINE void multiply_step(vf (&acc)[NR][MR], const float* x, int64_t ldx, const W* w,
                                        int64_t ldw) {
  vf wv[NR];
#pragma GCC unroll 16
  for (int n = 0; n < NR; n++) wv[n] = in_register(vload(w + n * ldw));
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    vf xv = in_register(vload(x + m * ldx));
#pragma GCC unroll 16
    for (int n = 0; n < NR; n++) acc[n][m] = vfma(wv[n], xv, acc[n][m]);
  }
}

// Sums the lanes of a [MR][NR] tile and adds the tail of K.
template <typename W, class Sink>
static inline void finish_tile(const float* lanes, int64_t MR, int64_t NR, const float* x,
                               int64_t ldx, const W* w, int64_t ldw, int64_t tail,
                               const Sink& sink) {
  for (int64_t m = 0; m < MR; m++)
    for (int64_t n = 0; n < NR; n++, lanes += VL) {
      float s = vsum(vload(lanes));
      for (int64_t t = 0; t < tail; t++)
        s = __builtin_fmaf(to_float(w[n * ldw + t]), x[m * ldx + t], s);
      sink(m, n, s);
    }
}

// The K loop goes by cache lines of w, so that each prefetch is issued once.
template <typename W, int NR, int MR, class Sink>
static ALWAYS_INLINE void dot_tile(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t K,
                                   Ahead ahead, const Sink& sink) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(W));
  vf acc[NR][MR];
#pragma GCC unroll 16
  for (int n = 0; n < NR; n++)
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) acc[n][m] = vzero();
  int64_t k = 0;
  for (; k + kLine <= K; k += kLine) {
    ahead.step();
#pragma GCC unroll kUnrollLine
    for (int64_t j = 0; j < kLine; j += VL)
      multiply_step<W, NR, MR>(acc, x + k + j, ldx, w + k + j, ldw);
  }
  for (; k + VL <= K; k += VL) multiply_step<W, NR, MR>(acc, x + k, ldx, w + k, ldw);
  alignas(64) float lanes[MR * NR * VL];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
    for (int n = 0; n < NR; n++) vstore(lanes + (m * NR + n) * VL, acc[n][m]);
  finish_tile(lanes, MR, NR, x + k, ldx, w + k, ldw, K - k, sink);
}
