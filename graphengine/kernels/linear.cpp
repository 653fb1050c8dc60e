// linear and gate_up: tiles of dot products over row-major [N, K] weights.
#include "abi.h"
#include "dot.h"
#include "team.h"

namespace {

struct Store {
  float* out;
  int64_t ld;
  const float* bias;
  bool accumulate;
  ALWAYS_INLINE void operator()(int64_t m, int64_t n, float s) const {
    float* p = out + m * ld + n;
    if (bias) s += bias[n];
    *p = accumulate ? *p + s : s;
  }
  Store at(int64_t m, int64_t n) const {
    return Store{out + m * ld + n, ld, bias ? bias + n : nullptr, accumulate};
  }
};

constexpr int PF = 2048;

template <typename W, int NR, int MR>
void range(const float* x, const W* w, const Store& store, int64_t K, int64_t N) {
  int64_t n = 0;
  for (; n + NR <= N; n += NR) dot_tile<W, NR, MR, PF>(x, K, w + n * K, K, K, store.at(0, n));
  for (; n < N; n++) dot_tile<W, 1, MR, PF>(x, K, w + n * K, K, K, store.at(0, n));
}

// out[M, N] = x[M, K] @ w[N, K]^T on one thread.
template <typename W>
void rows(const float* x, const W* w, const Store& store, int64_t M, int64_t K, int64_t N) {
  switch (M) {
    case 1: return range<W, 2, 1>(x, w, store, K, N);
    case 2: return range<W, 4, 2>(x, w, store, K, N);
    case 3: return range<W, 4, 3>(x, w, store, K, N);
    case 4: return range<W, 3, 4>(x, w, store, K, N);
    case 5: return range<W, 2, 5>(x, w, store, K, N);
    case 6: return range<W, 2, 6>(x, w, store, K, N);
    case 7: return range<W, 2, 7>(x, w, store, K, N);
  }
  constexpr int64_t kRowBlock = 48;
  for (int64_t m0 = 0; m0 < M; m0 += kRowBlock) {
    int64_t m1 = m0 + kRowBlock < M ? m0 + kRowBlock : M;
    for (int64_t n = 0; n < N; n += 3) {
      int64_t width = N - n < 3 ? N - n : 3;
      for (int64_t m = m0; m < m1; m += 4) {
        Store to = store.at(m, n);
        switch (m1 - m) {
          case 1: range<W, 3, 1>(x + m * K, w + n * K, to, K, width); break;
          case 2: range<W, 3, 2>(x + m * K, w + n * K, to, K, width); break;
          case 3: range<W, 3, 3>(x + m * K, w + n * K, to, K, width); break;
          default: range<W, 3, 4>(x + m * K, w + n * K, to, K, width);
        }
      }
    }
  }
}

template <typename W>
void linear(float* out, const float* x, const W* w, const float* bias, int64_t M, int64_t N,
            int64_t K, bool accumulate) {
  constexpr int64_t kUnit = 24;
  int64_t units = (N + kUnit - 1) / kUnit;
  launch(M * N * K, [=](const Team& team) {
    int64_t n0 = team.begin(units) * kUnit, n1 = team.end(units) * kUnit;
    if (n1 > N) n1 = N;
    if (n0 >= n1) return;
    rows<W>(x, w + n0 * K, Store{out, N, bias, accumulate}.at(0, n0), M, K, n1 - n0);
  });
}

// gate[i] = silu(gate[i]) * up[i] for one row.
void silu_multiply(float* out, const float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; i += VL) {
    int64_t n = count - i < VL ? count - i : VL;
    vf g = n == VL ? vload(gate + i) : vload_part(gate + i, n);
    vf u = n == VL ? vload(up + i) : vload_part(up + i, n);
    vf v = vmul(vdiv(g, vadd(vset(1.0f), vexp(vsub(vzero(), g)))), u);
    if (n == VL) {
      vstore(out + i, v);
    } else {
      vstore_part(out + i, v, n);
    }
  }
}

template <typename W>
void gate_up(float* out, const float* x, const W* w, int64_t M, int64_t I, int64_t K) {
  constexpr int64_t kUnit = 24, kRows = 48;
  int64_t units = (I + kUnit - 1) / kUnit;
  launch(2 * M * I * K, [=](const Team& team) {
    alignas(64) float gate[kRows * kUnit], up[kRows * kUnit];
    for (int64_t m0 = 0; m0 < M; m0 += kRows) {
      int64_t rows_here = M - m0 < kRows ? M - m0 : kRows;
      for (int64_t u = team.begin(units); u < team.end(units); u++) {
        int64_t i = u * kUnit, width = I - i < kUnit ? I - i : kUnit;
        rows<W>(x + m0 * K, w + i * K, Store{gate, kUnit, nullptr, false}, rows_here, K, width);
        rows<W>(x + m0 * K, w + (I + i) * K, Store{up, kUnit, nullptr, false}, rows_here, K, width);
        for (int64_t m = 0; m < rows_here; m++)
          silu_multiply(out + (m0 + m) * I + i, gate + m * kUnit, up + m * kUnit, width);
      }
    }
  });
}

}  // namespace

#define DEFINE(T, SUFFIX)                                                                          \
  void linear_##SUFFIX(float* out, const float* x, const T* w, const float* bias, int64_t M,       \
                       int64_t N, int64_t K, int64_t accumulate) {                                 \
    linear<T>(out, x, w, bias, M, N, K, accumulate != 0);                                          \
  }                                                                                                \
  void gate_up_##SUFFIX(float* out, const float* x, const T* w, int64_t M, int64_t I, int64_t K) { \
    gate_up<T>(out, x, w, M, I, K);                                                                \
  }
DEFINE(bf16, bf16)
DEFINE(float, f32)
