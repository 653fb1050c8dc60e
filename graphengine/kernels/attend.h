// Attention of a few queries over one chunk of keys and values that lie widened in a buffer.
//
// Knows nothing of pages, requests or threads. A chunk has kChunk places; a query sees the places
// [begin, end) of it. What it gets (max, sum, weighted values) depends on its own places alone: other
// queries of the same call, and whatever lies in places it may not see (NaN too), leave no trace.
#pragma once
#include <limits>

#include "vec.h"

constexpr int64_t kChunk = 64;      // positions a chunk
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxQueries = 32;  // that share one loaded chunk
constexpr float kNone = -std::numeric_limits<float>::infinity();

constexpr int64_t padded(int64_t D) { return (D + VL - 1) / VL * VL; }

// Softmax of one query in progress: acc[padded(D)], then the maximum and the sum.
struct Partial {
  float* acc;
  int64_t width;  // padded(D)
  static int64_t floats(int64_t D) { return padded(D) + VL; }
  float& max() const { return acc[width]; }
  float& sum() const { return acc[width + 1]; }
};

struct Query {
  int64_t begin, end;  // places that it sees; begin < end
  Partial result;
};

// One thread's working set. Rows are padded(D) long, the padding zero.
struct Workspace {
  alignas(64) float key[kChunk * kMaxHeadDim];
  alignas(64) float value[kChunk * kMaxHeadDim];
  alignas(64) float query[kMaxQueries * kMaxHeadDim];
  alignas(64) float weight[kMaxQueries * kChunk];
};

// Scores of MR queries for four places each step; those outside a query's view are masked later.
template <int MR>
inline void score(float* weight, const float* q, const float* key, int64_t from, int64_t to,
                  int64_t width) {
  for (int64_t j = from / 4 * 4; j < to; j += 4) {
    vf acc[MR][4];
#pragma GCC unroll 4
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) acc[m][n] = vzero();
    for (int64_t d = 0; d < width; d += VL) {
      vf qv[MR];
#pragma GCC unroll 4
      for (int m = 0; m < MR; m++) qv[m] = in_register(vload(q + m * width + d));
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) {
        vf kv = in_register(vload(key + (j + n) * width + d));
#pragma GCC unroll 4
        for (int m = 0; m < MR; m++) acc[m][n] = vfma(qv[m], kv, acc[m][n]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < MR; m++)
      vsum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], weight + m * kChunk + j);
  }
}

// weight[j] = exp(weight[j] * scale - max), 0 outside [begin, end); lanes are tied to places.
inline void soften(float* weight, const Query& query, float scale) {
  int64_t first = query.begin / VL * VL, last = (query.end + VL - 1) / VL * VL;
  for (int64_t j = first; j < query.begin; j++) weight[j] = kNone;
  for (int64_t j = query.end; j < last; j++) weight[j] = kNone;
  vf top = vset(kNone);
  for (int64_t j = first; j < last; j += VL) {
    vf s = vmul(vload(weight + j), vset(scale));
    vstore(weight + j, s);
    top = vmax(s, top);
  }
  float max = vhmax(top);
  vf sum = vzero();
  for (int64_t j = first; j < last; j += VL) {
    vf e = vexp(vsub(vload(weight + j), vset(max)));
    vstore(weight + j, e);
    sum = vadd(sum, e);
  }
  query.result.max() = max;
  query.result.sum() = vsum(sum);
}

// acc += weight[j] * value[j] over places [from, to), ascending, for NV vectors of MR queries.
template <int MR, int NV>
inline void weigh_lanes(const Query* queries, const float* weight, const float* value, int64_t from,
                        int64_t to, int64_t d, int64_t width) {
  vf acc[MR][NV];
#pragma GCC unroll 4
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[m][v] = vload(queries[m].result.acc + d + v * VL);
  for (int64_t j = from; j < to; j++) {
    vf e[MR];
#pragma GCC unroll 4
    for (int m = 0; m < MR; m++) e[m] = in_register(vset(weight[m * kChunk + j]));
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      vf x = in_register(vload(value + j * width + d + v * VL));
#pragma GCC unroll 4
      for (int m = 0; m < MR; m++) acc[m][v] = vfma(e[m], x, acc[m][v]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) vstore(queries[m].result.acc + d + v * VL, acc[m][v]);
}

template <int MR>
inline void weigh(const Query* queries, const float* weight, const float* value, int64_t from,
                  int64_t to, int64_t width) {
  if (from >= to) return;
  int64_t d = 0;
  for (; d + 4 * VL <= width; d += 4 * VL)
    weigh_lanes<MR, 4>(queries, weight, value, from, to, d, width);
  for (; d < width; d += VL) weigh_lanes<MR, 1>(queries, weight, value, from, to, d, width);
}

template <int MR>
inline void attend_tile(Workspace& work, const Query* queries, int64_t at, int64_t width,
                        float scale) {
  float* weight = work.weight + at * kChunk;
  int64_t begin = kChunk, end = 0, inner_begin = 0, inner_end = kChunk;
  for (int m = 0; m < MR; m++) {
    const Query& q = queries[m];
    begin = q.begin < begin ? q.begin : begin;
    end = q.end > end ? q.end : end;
    inner_begin = q.begin > inner_begin ? q.begin : inner_begin;
    inner_end = q.end < inner_end ? q.end : inner_end;
  }
  score<MR>(weight, work.query + at * width, work.key, begin, end, width);
  for (int m = 0; m < MR; m++) {
    soften(weight + m * kChunk, queries[m], scale);
    for (int64_t d = 0; d < width; d += VL) vstore(queries[m].result.acc + d, vzero());
  }
  // Places that all see go together, the rest query by query: a place that a query may not see must
  // not be multiplied by its zero weight, since 0 * NaN is NaN. Each query's order stays ascending.
  bool overlap = inner_begin < inner_end;
  for (int m = 0; m < MR; m++)
    weigh<1>(queries + m, weight + m * kChunk, work.value, queries[m].begin,
             overlap ? inner_begin : queries[m].end, width);
  if (!overlap) return;
  weigh<MR>(queries, weight, work.value, inner_begin, inner_end, width);
  for (int m = 0; m < MR; m++)
    weigh<1>(queries + m, weight + m * kChunk, work.value, inner_end, queries[m].end, width);
}

// Results of `count` queries, whose vectors lie in work.query, over the chunk in work.key and value.
inline void attend(Workspace& work, const Query* queries, int64_t count, int64_t D, float scale) {
  int64_t at = 0, width = padded(D);
  for (; at + 3 <= count; at += 3) attend_tile<3>(work, queries + at, at, width, scale);
  if (count - at == 2) attend_tile<2>(work, queries + at, at, width, scale);
  if (count - at == 1) attend_tile<1>(work, queries + at, at, width, scale);
}

// Joins the next chunk's result to a state; the order of chunks is the caller's.
inline void combine(Partial state, Partial part) {
  float top = part.max() > state.max() ? part.max() : state.max();
  float keep = exp_scalar(state.max() - top), add = exp_scalar(part.max() - top);
  state.sum() = __builtin_fmaf(state.sum(), keep, part.sum() * add);
  state.max() = top;
  for (int64_t d = 0; d < state.width; d += VL) {
    vf scaled = vmul(vload(part.acc + d), vset(add));
    vstore(state.acc + d, vfma(vload(state.acc + d), vset(keep), scaled));
  }
}

inline void finish(float* out, Partial state, int64_t D) {
  for (int64_t d = 0; d < D; d += VL) {
    vf v = vdiv(vload(state.acc + d), vset(state.sum()));
    if (D - d >= VL) {
      vstore(out + d, v);
    } else {
      vstore_part(out + d, v, D - d);
    }
  }
}
