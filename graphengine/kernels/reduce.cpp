// argmax_rows: lowest id on ties, NaN never wins; exact, so the split over threads is free.
#include <cmath>
#include <limits>

#include "abi.h"
#include "team.h"

namespace {

struct Best {
  float value;
  int64_t index;  // -1: nothing above -inf seen
};

constexpr float kNone = -std::numeric_limits<float>::infinity();

// A thread's share of the flattened [M * V] range touches at most two rows that it does not own
// whole: the row it starts inside (head) and the row it ends inside (tail).
struct Edges {
  Best head, tail;
};
static_assert(sizeof(Edges) * kMaxThreads <= kSharedBytes, "one Edges a thread");

Best best_of(const float* x, int64_t count) {
  constexpr int64_t kBlock = 64 * VL;
  float best = kNone;
  int64_t where = -1;
  for (int64_t b = 0; b < count; b += kBlock) {
    int64_t n = count - b < kBlock ? count - b : kBlock, i = 0;
    vf top[4] = {vset(kNone), vset(kNone), vset(kNone), vset(kNone)};
    for (; i + 4 * VL <= n; i += 4 * VL)
      for (int j = 0; j < 4; j++) top[j] = vmax(vload(x + b + i + j * VL), top[j]);
    for (; i < n; i += VL) {
      vf v = n - i >= VL ? vload(x + b + i) : vload_part(x + b + i, n - i, kNone);
      top[0] = vmax(v, top[0]);
    }
    float value = vhmax(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
    if (value > best) {
      best = value;
      where = b;
    }
  }
  if (where < 0) return {kNone, -1};
  while (!(x[where] == best)) where++;
  return {best, where};
}

// A row without anything above -inf: its first number, else (all NaN) 0.
int64_t first_number(const float* row, int64_t V) {
  for (int64_t i = 0; i < V; i++)
    if (!std::isnan(row[i])) return i;
  return 0;
}

}  // namespace

void argmax_rows(int32_t* out, const float* logits, int64_t M, int64_t V) {
  auto finish = [=](int64_t row, Best best) {
    out[row] = static_cast<int32_t>(best.index >= 0 ? best.index
                                                    : first_number(logits + row * V, V));
  };
  launch(M * V, [=](const Team& team) {
    int64_t begin = team.begin(M * V), end = team.end(M * V);
    Edges* edges = static_cast<Edges*>(team.room());
    Edges& mine = edges[team.tid];
    mine = {{kNone, -1}, {kNone, -1}};
    for (int64_t at = begin; at < end;) {
      int64_t row = at / V, column = at - row * V;
      int64_t stop = (row + 1) * V < end ? (row + 1) * V : end;
      Best best = best_of(logits + at, stop - at);
      if (best.index >= 0) best.index += column;
      if (column > 0) {
        mine.head = best;
      } else if (stop < (row + 1) * V) {
        mine.tail = best;
      } else {
        finish(row, best);
      }
      at = stop;
    }
    team.barrier();
    // The thread that holds the start of a split row joins its pieces in order.
    int64_t row = end / V;
    if (begin == end || end == row * V || begin > row * V) return;
    Best best = mine.tail;
    for (int64_t t = team.tid + 1; t < team.size && M * V * t / team.size < (row + 1) * V; t++)
      if (edges[t].head.value > best.value) best = edges[t].head;
    finish(row, best);
  });
}
