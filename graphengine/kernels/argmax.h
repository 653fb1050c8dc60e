// The largest of a range: lowest id on ties, NaN never wins.
#pragma once
#include <cmath>
#include <limits>

#include "vec.h"

struct Best {
  float value;
  int64_t index;  // -1: nothing above -inf seen
};

constexpr float kNone = -std::numeric_limits<float>::infinity();

static inline float max_of(const float* x, int64_t count) {
  vf top[4] = {vset(kNone), vset(kNone), vset(kNone), vset(kNone)};
  int64_t i = 0;
  for (; i + 4 * VL <= count; i += 4 * VL)
    for (int j = 0; j < 4; j++) top[j] = vmax(vload(x + i + j * VL), top[j]);
  for (; i < count; i += VL) {
    vf v = count - i >= VL ? vload(x + i) : vload_part(x + i, count - i, kNone);
    top[0] = vmax(v, top[0]);
  }
  return vhmax(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
}

static inline Best best_of(const float* x, int64_t count) {
  constexpr int64_t kBlock = 64 * VL;
  Best best{kNone, -1};
  for (int64_t b = 0; b < count; b += kBlock) {
    float value = max_of(x + b, count - b < kBlock ? count - b : kBlock);
    if (value > best.value) best = {value, b};
  }
  if (best.index >= 0)
    while (!(x[best.index] == best.value)) best.index++;
  return best;
}

// A row without anything above -inf: its first number, else (all NaN) 0.
static inline int64_t first_number(const float* row, int64_t V) {
  for (int64_t i = 0; i < V; i++)
    if (!std::isnan(row[i])) return i;
  return 0;
}

static inline int64_t index_of(Best best, const float* row, int64_t V) {
  return best.index >= 0 ? best.index : first_number(row, V);
}
