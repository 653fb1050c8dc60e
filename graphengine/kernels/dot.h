// The one dot product: out[m][n] = x[m] . w[n], row-major both, x as operand.h has it.
//
// One VL-wide accumulator a pair (m, n), k ascending; one horizontal sum; the tail of K by scalar fma.
// A pair's arithmetic is the same in every tile shape: that is what makes a row independent of M.
#pragma once
#include "operand.h"
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
static ALWAYS_INLINE void multiply_step(vf (&acc)[NR][MR], const typename Operand<W>::Value* x,
                                        int64_t ldx, const W* w, int64_t ldw) {
  using Op = Operand<W>;
  typename Op::Vector wv[NR];
#pragma GCC unroll 16
  for (int n = 0; n < NR; n++) wv[n] = Op::load(w + n * ldw);
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    typename Op::Vector xv = Op::load(x + m * ldx);
#pragma GCC unroll 16
    for (int n = 0; n < NR; n++) acc[n][m] = Op::multiply_add(wv[n], xv, acc[n][m]);
  }
}

// The horizontal sums of the accumulators of one row.
template <int NR, int MR>
static ALWAYS_INLINE void sum_lanes(const vf (&acc)[NR][MR], int m, float* sums) {
  auto at = [&](int n) __attribute__((always_inline)) { return n < NR ? acc[n][m] : vzero(); };
#pragma GCC unroll 16
  for (int n = 0; n < NR; n += 4) vsum4(at(n), at(n + 1), at(n + 2), at(n + 3), sums + n);
}

// The K loop goes by cache lines of w, so that each prefetch is issued once.
template <typename W, int NR, int MR, class Sink>
static ALWAYS_INLINE void dot_tile(const typename Operand<W>::Value* x, int64_t ldx, const W* w,
                                   int64_t ldw, int64_t K, Ahead ahead, const Sink& sink) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(W)), kStep = Operand<W>::kStep;
  vf acc[NR][MR];
#pragma GCC unroll 16
  for (int n = 0; n < NR; n++)
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) acc[n][m] = vzero();
  int64_t k = 0;
  for (; k + kLine <= K; k += kLine) {
    ahead.step();
#pragma GCC unroll kUnrollLine
    for (int64_t j = 0; j < kLine; j += kStep)
      multiply_step<W, NR, MR>(acc, x + k + j, ldx, w + k + j, ldw);
  }
  for (; k + kStep <= K; k += kStep) multiply_step<W, NR, MR>(acc, x + k, ldx, w + k, ldw);
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    float sums[(NR + 3) / 4 * 4];
    sum_lanes(acc, m, sums);
    for (int64_t t = k; t < K; t++)
      for (int n = 0; n < NR; n++)
        sums[n] = __builtin_fmaf(to_float(w[n * ldw + t]), to_float(x[m * ldx + t]), sums[n]);
#pragma GCC unroll 16
    for (int n = 0; n < NR; n++) sink(m, n, sums[n]);
  }
}
