// paged_attention: softmax(q k^T / sqrt(D)) v over a paged cache, read in place.
//
// A context is cut into fixed chunks of absolute positions. A row's partial result of a chunk (max,
// sum, weighted values) is computed by itself, and partials are combined strictly in chunk order. So
// the bits of a row depend on its query, its position and the keys and values it may see: not on the
// batch, the number of query rows, the threads, or which of the two schedules ran.
#include <cmath>
#include <limits>

#include "abi.h"
#include "dot.h"
#include "team.h"

namespace {

constexpr int64_t kChunk = 64;       // positions a chunk
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kQueryBlock = 32;  // (row, head) pairs that share one widened chunk
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <typename T>
struct Problem {
  float* out;
  const float* qkv;
  const T* kv_cache;
  const int32_t* block_table;
  const int32_t* query_start_loc;
  const int32_t* positions;
  int64_t R, table_stride, Hq, Hkv, D, block_size, window;
  float* scratch;
  int64_t scratch_floats;

  int64_t group() const { return Hq / Hkv; }
  int64_t partial_floats() const { return D + 2; }
  int64_t first(int64_t t) const {
    return window > 0 && positions[t] >= window ? positions[t] - window + 1 : 0;
  }
  const float* query(int64_t t, int64_t head) const { return qkv + (t * (Hq + 2 * Hkv) + head) * D; }
  // Key of one position; its value lies one plane further.
  const T* key(int64_t r, int64_t position, int64_t kv_head) const {
    int64_t block = block_table[r * table_stride + position / block_size];
    return kv_cache + (block * 2 * block_size + position % block_size) * Hkv * D + kv_head * D;
  }
  int64_t plane() const { return block_size * Hkv * D; }
};

// Running or partial softmax of one (row, head): [max, sum, acc[D]].
struct Partial {
  float* data;
  float& max() const { return data[0]; }
  float& sum() const { return data[1]; }
  float* acc() const { return data + 2; }
};

// D is a multiple of 8; the last step of a 16-lane vector may be half full.
template <class F>
ALWAYS_INLINE void for_lanes(int64_t D, const F& f) {
  for (int64_t d = 0; d < D; d += VL) f(d, D - d < VL ? D - d : static_cast<int64_t>(VL));
}
ALWAYS_INLINE vf load_lanes(const float* p, int64_t n) { return n == VL ? vload(p) : vload_part(p, n); }
ALWAYS_INLINE void store_lanes(float* p, vf v, int64_t n) {
  if (n == VL) {
    vstore(p, v);
  } else {
    vstore_part(p, v, n);
  }
}

void combine(Partial into, Partial part, int64_t D) {
  float top = part.max() > into.max() ? part.max() : into.max();
  float keep = exp_scalar(into.max() - top), add = exp_scalar(part.max() - top);
  into.sum() = __builtin_fmaf(into.sum(), keep, part.sum() * add);
  into.max() = top;
  for_lanes(D, [&](int64_t d, int64_t n) {
    vf scaled = vmul(load_lanes(part.acc() + d, n), vset(add));
    store_lanes(into.acc() + d, vfma(load_lanes(into.acc() + d, n), vset(keep), scaled), n);
  });
}

void finish(float* out, Partial state, int64_t D) {
  for_lanes(D, [&](int64_t d, int64_t n) {
    store_lanes(out + d, vdiv(load_lanes(state.acc() + d, n), vset(state.sum())), n);
  });
}

// Keys and values of one chunk for one kv head, widened: only positions [begin, end) are read.
template <typename T>
struct Chunk {
  int64_t begin, end;
  alignas(64) float key[kChunk * kMaxHeadDim];
  alignas(64) float value[kChunk * kMaxHeadDim];

  void load(const Problem<T>& p, int64_t r, int64_t kv_head, int64_t from, int64_t to) {
    begin = from;
    end = to;
    for (int64_t j = 0; j < to - from; j++) {
      const T* k = p.key(r, from + j, kv_head);
      const T* v = k + p.plane();
      for (int64_t d = 0; d < p.D; d++) key[j * p.D + d] = to_float(k[d]);
      for (int64_t d = 0; d < p.D; d++) value[j * p.D + d] = to_float(v[d]);
    }
  }
};

// Partial of one query over positions [from, to) of a loaded chunk.
template <typename T>
void attend(Partial out, const float* q, const Chunk<T>& chunk, int64_t from, int64_t to, int64_t D,
            float scale) {
  alignas(64) float weight[kChunk + VL];
  int64_t count = to - from;
  const float* keys = chunk.key + (from - chunk.begin) * D;
  const float* values = chunk.value + (from - chunk.begin) * D;
  auto sink = [&](int64_t j) {
    return [&, j](int64_t, int64_t n, float s) { weight[j + n] = s * scale; };
  };
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) dot_tile<float, 4, 1>(q, D, keys + j * D, D, D, Ahead{nullptr, 0}, sink(j));
  for (; j < count; j++) dot_tile<float, 1, 1>(q, D, keys + j * D, D, D, Ahead{nullptr, 0}, sink(j));
  for (j = count; j % VL; j++) weight[j] = kNone;
  float top = kNone;
  for (j = 0; j < count; j++) top = weight[j] > top ? weight[j] : top;
  vf sums = vzero();
  for (j = 0; j < count; j += VL) {
    vf e = vexp(vsub(vload(weight + j), vset(top)));
    vstore(weight + j, e);
    sums = vadd(sums, e);
  }
  out.max() = top;
  out.sum() = vsum(sums);
  for_lanes(D, [&](int64_t d, int64_t n) {
    vf acc = vzero();
    for (int64_t i = 0; i < count; i++)
      acc = vfma(vset(weight[i]), load_lanes(values + i * D + d, n), acc);
    store_lanes(out.acc() + d, acc, n);
  });
}

// The largest number of chunks that any row of a request spans, counted from chunk 0.
template <typename T>
int64_t chunks_of(const Problem<T>& p, int64_t r) {
  int64_t last = -1;
  for (int64_t t = p.query_start_loc[r]; t < p.query_start_loc[r + 1]; t++)
    if (p.positions[t] / kChunk > last) last = p.positions[t] / kChunk;
  return last + 1;
}

// Partials of rows [t0, t1) x the group's heads over chunk c; to(t, g) says where each goes. Rows
// that see nothing of the chunk are left out.
template <typename T, class To>
void do_chunk(const Problem<T>& p, Chunk<T>& chunk, int64_t r, int64_t kv_head, int64_t c, int64_t t0,
              int64_t t1, const To& to) {
  int64_t low = (c + 1) * kChunk, high = c * kChunk;
  auto begin_of = [&](int64_t t) { return p.first(t) > c * kChunk ? p.first(t) : c * kChunk; };
  auto end_of = [&](int64_t t) {
    return p.positions[t] + 1 < (c + 1) * kChunk ? p.positions[t] + 1 : (c + 1) * kChunk;
  };
  for (int64_t t = t0; t < t1; t++) {
    if (begin_of(t) >= end_of(t)) continue;
    low = begin_of(t) < low ? begin_of(t) : low;
    high = end_of(t) > high ? end_of(t) : high;
  }
  if (low >= high) return;
  chunk.load(p, r, kv_head, low, high);
  float scale = 1.0f / std::sqrt(static_cast<float>(p.D));
  for (int64_t t = t0; t < t1; t++) {
    if (begin_of(t) >= end_of(t)) continue;
    for (int64_t g = 0; g < p.group(); g++)
      attend(to(t, g), p.query(t, kv_head * p.group() + g), chunk, begin_of(t), end_of(t), p.D, scale);
  }
}

// Prefill-sized: a thread takes (request, block of rows, kv head) and walks the chunks in order.
template <typename T>
void walk(const Problem<T>& p, const Team& team) {
  static thread_local Chunk<T> chunk;
  int64_t rows = kQueryBlock / p.group() > 0 ? kQueryBlock / p.group() : 1;
  int64_t pairs = rows * p.group(), width = p.partial_floats();
  alignas(64) float partials[kQueryBlock * (kMaxHeadDim + 2)];
  alignas(64) float states[kQueryBlock * (kMaxHeadDim + 2)];
  (void)pairs;
  int64_t unit = 0;
  for (int64_t r = 0; r < p.R; r++) {
    for (int64_t t0 = p.query_start_loc[r]; t0 < p.query_start_loc[r + 1]; t0 += rows) {
      int64_t t1 = t0 + rows < p.query_start_loc[r + 1] ? t0 + rows : p.query_start_loc[r + 1];
      for (int64_t h = 0; h < p.Hkv; h++) {
        if (unit++ % team.size != team.tid) continue;
        auto at = [&](float* base, int64_t t, int64_t g) {
          return Partial{base + ((t - t0) * p.group() + g) * width};
        };
        int64_t first = p.first(t0), last = 0;
        for (int64_t t = t0; t < t1; t++) {
          first = p.first(t) < first ? p.first(t) : first;
          last = p.positions[t] > last ? p.positions[t] : last;
          for (int64_t g = 0; g < p.group(); g++) at(states, t, g).max() = kNone;
        }
        for (int64_t c = first / kChunk; c <= last / kChunk; c++) {
          do_chunk(p, chunk, r, h, c, t0, t1, [&](int64_t t, int64_t g) { return at(partials, t, g); });
          for (int64_t t = t0; t < t1; t++) {
            if (p.first(t) >= (c + 1) * kChunk || p.positions[t] < c * kChunk) continue;
            for (int64_t g = 0; g < p.group(); g++) {
              Partial state = at(states, t, g), part = at(partials, t, g);
              if (c == p.first(t) / kChunk) {
                std::memcpy(state.data, part.data, width * sizeof(float));
              } else {
                combine(state, part, p.D);
              }
            }
          }
        }
        for (int64_t t = t0; t < t1; t++)
          for (int64_t g = 0; g < p.group(); g++)
            finish(p.out + (t * p.Hq + h * p.group() + g) * p.D, at(states, t, g), p.D);
      }
    }
  }
}

// Few rows: threads share (request, chunk, kv head); partials wait in scratch, then each (row, head)
// combines its own in chunk order.
template <typename T>
void split(const Problem<T>& p, const Team& team, int64_t stride) {
  static thread_local Chunk<T> chunk;
  int64_t width = p.partial_floats();
  auto at = [&](int64_t t, int64_t head, int64_t c) {
    return Partial{p.scratch + ((t * p.Hq + head) * stride + c) * width};
  };
  int64_t units = 0;
  for (int64_t r = 0; r < p.R; r++) units += chunks_of(p, r) * p.Hkv;
  int64_t begin = team.begin(units), end = team.end(units), unit = 0;
  for (int64_t r = 0; r < p.R && unit < end; r++) {
    int64_t here = chunks_of(p, r) * p.Hkv;
    for (int64_t i = begin > unit ? begin - unit : 0; i < here && unit + i < end; i++) {
      int64_t c = i / p.Hkv, h = i % p.Hkv;
      do_chunk(p, chunk, r, h, c, p.query_start_loc[r], p.query_start_loc[r + 1],
               [&](int64_t t, int64_t g) { return at(t, h * p.group() + g, c); });
    }
    unit += here;
  }
  team.barrier();
  int64_t pairs = p.query_start_loc[p.R] * p.Hq;
  for (int64_t i = team.begin(pairs); i < team.end(pairs); i++) {
    int64_t t = i / p.Hq, head = i % p.Hq, c = p.first(t) / kChunk;
    Partial state = at(t, head, c);
    while (++c <= p.positions[t] / kChunk) combine(state, at(t, head, c), p.D);
    finish(p.out + i * p.D, state, p.D);
  }
}

template <typename T>
void paged_attention(const Problem<T>& p) {
  int64_t most_rows = 0, most_chunks = 0, work = 0;
  for (int64_t r = 0; r < p.R; r++) {
    int64_t rows = p.query_start_loc[r + 1] - p.query_start_loc[r], chunks = chunks_of(p, r);
    most_rows = rows > most_rows ? rows : most_rows;
    most_chunks = chunks > most_chunks ? chunks : most_chunks;
    work += rows * chunks * kChunk * p.Hq * p.D;
  }
  int64_t needed = p.query_start_loc[p.R] * p.Hq * most_chunks * p.partial_floats();
  bool use_split = most_rows * p.group() <= kQueryBlock && needed <= p.scratch_floats;
  launch(work, [&](const Team& team) {
    if (use_split && team.size > 1) {
      split(p, team, most_chunks);
    } else {
      walk(p, team);
    }
  });
}

}  // namespace

#define DEFINE(T, SUFFIX)                                                                          \
  void paged_attention_##SUFFIX(                                                                   \
      float* out, const float* qkv, const T* kv_cache, const int32_t* block_table,                 \
      const int32_t* query_start_loc, const int32_t* positions, int64_t R, int64_t table_stride,   \
      int64_t Hq, int64_t Hkv, int64_t D, int64_t block_size, int64_t sliding_window,              \
      float* scratch, int64_t scratch_floats) {                                                    \
    paged_attention<T>(Problem<T>{out, qkv, kv_cache, block_table, query_start_loc, positions, R,  \
                                  table_stride, Hq, Hkv, D, block_size, sliding_window, scratch,   \
                                  scratch_floats});                                                \
  }
DEFINE(bf16, bf16)
DEFINE(float, f32)
