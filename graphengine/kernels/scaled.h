// Rows of logits scaled by a temperature, and what is drawn from them: target and drafts alike.
#pragma once
#include <algorithm>
#include <cmath>

#include "argmax.h"
#include "noise.h"

constexpr int64_t kBlock = 64;

// x = (x - largest) / temperature, so that the largest is 0; NaN becomes -inf.
static inline void scale(float* x, int64_t V, float largest, float temperature) {
  bool infinite = largest > std::numeric_limits<float>::max();
  for (int64_t v = 0; v < V; v++) {
    float y = infinite ? (x[v] == largest ? 0.0f : kNone) : (x[v] - largest) / temperature;
    x[v] = y <= 0 ? y : kNone;
  }
}

// Sum of exp(y): p(v) is exp(y[v]) over it.
static inline double normaliser(const float* y, int64_t V) {
  double total = 0;
  for (int64_t v = 0; v < V; v++) total += exp_scalar(y[v]);
  return total;
}

// The token whose scaled number and noise together are the largest: a draw from the softmax (Gumbel-max).
static inline int64_t gumbel_argmax(const float* y, int64_t V, const Noise& noise) {
  Best top = best_of(y, V);
  if (top.index < 0) return index_of(top, y, V);
  uint32_t words[kBlock];
  noise.words64(static_cast<uint32_t>(top.index / kBlock), words);
  double best = top.value + Noise::to_gumbel(words[top.index % kBlock]);
  int64_t chosen = top.index;
  for (int64_t b = 0; b < V; b += kBlock) {
    int64_t n = std::min(kBlock, V - b);
    double most = max_of(y + b, n);
    if (most + kLargestGumbel < best) continue;
    // -log(1 - u) >= u, so a token wins only where u <= exp(y - best): a comparison of integers.
    double bound = std::exp(most - best) * 0x1.00001p32;
    uint32_t limit = bound < 0xFFFFFFFFp0 ? static_cast<uint32_t>(bound) : 0xFFFFFFFF;
    noise.words64(static_cast<uint32_t>(b / kBlock), words);
    for (int64_t i = 0; i < n; i++) {
      if (words[i] > limit || y[b + i] == kNone) continue;
      double value = y[b + i] + Noise::to_gumbel(words[i]);
      if (value > best || (value == best && b + i < chosen)) {
        best = value;
        chosen = b + i;
      }
    }
  }
  return chosen;
}
