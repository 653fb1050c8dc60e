// What the sampler must know of a request: a row of sampling/settings.py, which has the same fields.
#pragma once
#include <cstdint>

enum SettingsFlags : int32_t {
  kPenalties = 1,  // repetition, frequency or presence
  kMask = 2,       // the step's bit mask holds for its rows
};

struct Settings {
  float temperature;  // 0: greedy
  float top_p, min_p;
  float repetition_penalty, frequency_penalty, presence_penalty;
  int32_t top_k;  // 0: off
  int32_t flags;
  uint32_t seed_low, seed_high, choice;
  int32_t num_bias;
};
static_assert(sizeof(Settings) == 48, "no padding");
