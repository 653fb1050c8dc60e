// argmax_rows: lowest id on ties, NaN never wins; exact, so the split over threads is free.
#include "abi.h"
#include "argmax.h"
#include "team.h"

namespace {

// A thread's share of the flattened [M * V] range touches at most two rows that it does not own
// whole: the row it starts inside (head) and the row it ends inside (tail).
struct Edges {
  Best head, tail;
};
static_assert(sizeof(Edges) * kMaxThreads <= kSharedBytes, "one Edges a thread");

}  // namespace

void argmax_rows(int32_t* out, const float* logits, int64_t M, int64_t V) {
  auto finish = [=](int64_t row, Best best) {
    out[row] = static_cast<int32_t>(index_of(best, logits + row * V, V));
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
