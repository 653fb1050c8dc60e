// Log-probabilities of rows: of the chosen token, its rank, and of the likeliest tokens.
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "argmax.h"
#include "team.h"

namespace {

// log of the sum of exp(x), in index order; NaN counts as nothing.
double log_sum_exp(const float* x, int64_t V, float largest) {
  double total = 0;
  for (int64_t v = 0; v < V; v++)
    if (x[v] > kNone) total += std::exp(static_cast<double>(x[v]) - largest);
  return largest + std::log(total);
}

}  // namespace

// ids, values [T, width]: column 0 the row's chosen token, then its `width - 1` likeliest, best first,
// equal ones by lowest id. ranks [T]: how many are likelier than the chosen one, plus 1.
void row_logprobs(int32_t* ids, float* values, int32_t* ranks, const float* logits,
                  const int32_t* target_ids, int64_t T, int64_t V, int64_t width) {
  launch(T * V, [=](const Team& team) {
    for (int64_t row = team.begin(T); row < team.end(T); row++) {
      const float* x = logits + row * V;
      int32_t* id = ids + row * width;
      float* value = values + row * width;
      double norm = log_sum_exp(x, V, max_of(x, V));
      int32_t chosen = target_ids[row], rank = 1;
      int64_t most = std::min(width - 1, V), found = 0;
      for (int64_t v = 0; v < V; v++) {
        rank += x[v] > x[chosen];
        if (!(x[v] > kNone) || (found == most && !(most > 0 && x[v] > x[id[found]]))) continue;
        int64_t at = found < most ? ++found : most;  // the last place is the new one's or falls out
        for (; at > 1 && x[v] > x[id[at - 1]]; at--) id[at] = id[at - 1];
        id[at] = static_cast<int32_t>(v);
      }
      id[0] = chosen;
      ranks[row] = rank;
      std::fill(id + 1 + found, id + width, -1);
      for (int64_t i = 0; i < width; i++)
        value[i] = id[i] < 0 ? kNone : static_cast<float>(x[id[i]] - norm);
    }
  });
}
