// linear and gate_up: tiles of dot products over row-major [N, K] weights.
//
// Few rows are bound by memory: the weights stream past once, and every tile prefetches what the next
// tile reads, in address order. Many rows are bound by arithmetic: a block of weight rows stays in
// cache while all row tiles pass over it.
#include "abi.h"
#include "dot.h"
#include "team.h"

namespace {

// Rows of x in a tile, and weight rows beside them: accumulators, one x and the w's fill the registers.
#if defined(__AVX512F__)
constexpr int64_t kMaxTileRows = 7;
constexpr int kTileWidth[] = {0, 12, 8, 8, 6, 4, 4, 3};
constexpr int64_t kSmallBlock = 12;  // weight rows that L1 holds beside x
#else
constexpr int64_t kMaxTileRows = 6;
constexpr int kTileWidth[] = {0, 2, 4, 3, 3, 2, 2};
constexpr int64_t kSmallBlock = 6;
#endif
constexpr int64_t kLargeBlock = 64;
constexpr int64_t kFewTiles = 4;       // up to here a block of weights is kept in L1, beyond in L2
constexpr int64_t kPrefetchTiles = 12; // beyond, arithmetic hides the memory by itself
constexpr int64_t kLead = 512;         // bytes that a prefetch runs ahead of the next tile's start

template <typename W>
using Value = typename Operand<W>::Value;

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
  ALWAYS_INLINE Store at(int64_t m, int64_t n) const {
    return Store{out + m * ld + n, ld, bias ? bias + n : nullptr, accumulate};
  }
};

// A run of weight rows, and where the weights lie that this thread reads after them.
template <typename W>
struct Weights {
  const W* w;
  int64_t N, K;
  const W* after;
};

// MR rows of x over a run of weight rows.
template <typename W, int MR>
void row_tile(const Value<W>* x, const Weights<W>& run, const Store& store, Ahead ahead) {
  constexpr int NR = kTileWidth[MR];
  int64_t K = run.K, n = 0;
  for (; n + NR <= run.N; n += NR) {
    dot_tile<W, NR, MR>(x, K, run.w + n * K, K, K, ahead, store.at(0, n));
    ahead.at += ahead.lines * K * static_cast<int64_t>(sizeof(W));
  }
  for (; n < run.N; n++)
    dot_tile<W, 1, MR>(x, K, run.w + n * K, K, K, Ahead{nullptr, 0}, store.at(0, n));
}

template <typename W>
void any_row_tile(int64_t rows, const Value<W>* x, const Weights<W>& run, const Store& store,
                  Ahead ahead) {
  switch (rows) {
    case 1: return row_tile<W, 1>(x, run, store, ahead);
    case 2: return row_tile<W, 2>(x, run, store, ahead);
    case 3: return row_tile<W, 3>(x, run, store, ahead);
    case 4: return row_tile<W, 4>(x, run, store, ahead);
    case 5: return row_tile<W, 5>(x, run, store, ahead);
    case 6: return row_tile<W, 6>(x, run, store, ahead);
#if defined(__AVX512F__)
    case 7: return row_tile<W, 7>(x, run, store, ahead);
#endif
  }
}

template <typename W>
const char* bytes(const W* p) {
  return reinterpret_cast<const char*>(p);
}

// One tile of rows: the weights stream by; while a panel is multiplied the next one is fetched.
template <typename W>
void stream(const Value<W>* x, const Weights<W>& run, const Store& store, int64_t M) {
  int64_t panel = kTileWidth[M], body = run.N > panel ? run.N - panel : 0;
  body = body / panel * panel;
  Weights<W> head{run.w, body, run.K, nullptr};
  Weights<W> last{run.w + body * run.K, run.N - body, run.K, nullptr};
  any_row_tile(M, x, head, store, Ahead{bytes(run.w + panel * run.K) + kLead, panel});
  any_row_tile(M, x, last, store.at(0, body), Ahead{bytes(run.after), panel});
}

// Several tiles of rows: each passes over a block of weights and fetches its slice of the next block.
template <typename W>
void block_by_block(const Value<W>* x, const Weights<W>& run, const Store& store, int64_t M,
                    int64_t tiles) {
  int64_t block = tiles <= kFewTiles ? kSmallBlock : kLargeBlock, K = run.K;
  for (int64_t n = 0; n < run.N; n += block) {
    int64_t width = run.N - n < block ? run.N - n : block;
    Weights<W> part{run.w + n * K, width, K, nullptr};
    const char* next = bytes(n + width < run.N ? part.w + width * K : run.after);
    int64_t slice = width * K * static_cast<int64_t>(sizeof(W)) / tiles / 64 * 64;
    for (int64_t t = 0; t < tiles; t++) {
      int64_t m = M * t / tiles, rows = M * (t + 1) / tiles - m;
      int64_t lines = tiles <= kPrefetchTiles ? (kTileWidth[rows] + tiles - 1) / tiles : 0;
      any_row_tile(rows, x + m * K, part, store.at(m, n), Ahead{next + t * slice, lines});
    }
  }
}

template <typename W>
void multiply(const Value<W>* x, const Weights<W>& run, const Store& store, int64_t M) {
  int64_t tiles = (M + kMaxTileRows - 1) / kMaxTileRows;
  if (tiles == 1) {
    stream(x, run, store, M);
  } else {
    block_by_block(x, run, store, M, tiles);
  }
}

constexpr int64_t kShare = 24;   // weight rows that a thread's share is a multiple of
constexpr int64_t kStaged = 128;  // rows of x that are staged at a time: L2 holds them

template <typename W>
void linear(float* out, const float* x, const W* w, const float* bias, int64_t M, int64_t N,
            int64_t K, bool accumulate) {
  int64_t shares = (N + kShare - 1) / kShare;
  launch(M * N * K, [=](const Team& team) {
    int64_t n0 = team.begin(shares) * kShare, n1 = team.end(shares) * kShare;
    if (n1 > N) n1 = N;
    if (n0 >= n1) return;
    Weights<W> run{w + n0 * K, n1 - n0, K, w + n1 * K};
    Store store = Store{out, N, bias, accumulate}.at(0, n0);
    for (int64_t m = 0; m < M; m += kStaged) {
      int64_t rows = M - m < kStaged ? M - m : kStaged;
      multiply(Operand<W>::stage(x + m * K, rows * K), run, store.at(m, 0), rows);
    }
  });
}

// out = silu(gate) * up, elementwise; the tail of a row runs the same vector code.
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
  constexpr int64_t kWidth = 2 * kShare, kRows = 48;
  int64_t units = (I + kWidth - 1) / kWidth;
  launch(2 * M * I * K, [=](const Team& team) {
    alignas(64) float gate[kRows * kWidth], up[kRows * kWidth];
    for (int64_t m = 0; m < M; m += kRows) {
      int64_t rows = M - m < kRows ? M - m : kRows;
      const Value<W>* staged = Operand<W>::stage(x + m * K, rows * K);
      for (int64_t i = team.begin(units) * kWidth; i < team.end(units) * kWidth && i < I;
           i += kWidth) {
        int64_t width = I - i < kWidth ? I - i : kWidth;
        const W *gates = w + i * K, *ups = w + (I + i) * K;
        multiply(staged, Weights<W>{gates, width, K, ups}, Store{gate, kWidth, nullptr, false},
                 rows);
        multiply(staged, Weights<W>{ups, width, K, gates + width * K},
                 Store{up, kWidth, nullptr, false}, rows);
        for (int64_t r = 0; r < rows; r++)
          silu_multiply(out + (m + r) * I + i, gate + r * kWidth, up + r * kWidth, width);
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

// Whether a product with bf16 weights takes its rows as bf16.
int64_t rounds_activations() { return sizeof(Value<bf16>) == sizeof(bf16); }
