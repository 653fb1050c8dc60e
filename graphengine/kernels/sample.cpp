// Sampling: a request's processors on every row of its block, and the token that its noise chooses.
//
// What each does is defined in sampling/reference.py. Rows are independent; a row is one thread's, so
// the bits depend on nothing beside it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "abi.h"
#include "argmax.h"
#include "noise.h"
#include "scaled.h"
#include "settings.h"
#include "team.h"

namespace {

constexpr uint32_t kMinusInfinity = 0x7F800000;  // the key of -inf, the largest

struct Problem {
  const Settings* settings;
  const int32_t *token_ids, *counts;
  const uint8_t* in_prompt;
  const int32_t* bias_ids;
  const float* bias_values;
  const uint32_t* mask;
  int64_t V, max_bias;
};

float penalised(const Settings& s, float x, int32_t count, bool in_prompt) {
  if (count > 0 || in_prompt) x = x > 0 ? x / s.repetition_penalty : x * s.repetition_penalty;
  x -= static_cast<float>(count) * s.frequency_penalty;
  return x - (count > 0 ? s.presence_penalty : 0.0f);
}

// Bias and penalties of row `offset` of a block, which has seen that many drafts.
void bias_and_penalise(const Problem& p, const Settings& s, int64_t state, const int32_t* drafts,
                       int64_t offset, const float* x, float* out) {
  const int32_t* counts = p.counts + state * p.V;
  const uint8_t* in_prompt = p.in_prompt + state * p.V;
  bool penalise = s.flags & kPenalties;
  if (penalise)
    for (int64_t v = 0; v < p.V; v++) out[v] = penalised(s, x[v], counts[v], in_prompt[v]);
  else
    std::memcpy(out, x, p.V * sizeof(float));
  const int32_t* ids = p.bias_ids + state * p.max_bias;
  const float* values = p.bias_values + state * p.max_bias;
  // Tokens with a bias, or drafted before this row, once more and with all that holds for them.
  auto again = [&](int64_t v) {
    float biased = x[v];
    for (int64_t i = 0; i < s.num_bias; i++)
      if (ids[i] == v) biased += values[i];
    int64_t drafted = std::count(drafts, drafts + offset, static_cast<int32_t>(v));
    int32_t count = counts[v] + static_cast<int32_t>(drafted);
    out[v] = penalise ? penalised(s, biased, count, in_prompt[v]) : biased;
  };
  for (int64_t i = 0; i < s.num_bias; i++) again(ids[i]);
  if (penalise)
    for (int64_t i = 0; i < offset; i++) again(drafts[i]);
}

void apply_mask(const uint32_t* mask, float* x, int64_t V) {
  for (int64_t v = 0; v < V; v++)
    if (!(mask[v / 32] >> (v % 32) & 1)) x[v] = kNone;
}

// Numbers of a scaled row are at most 0: their magnitude as an integer, ascending as they descend.
uint32_t key_of(float y) {
  uint32_t bits;
  std::memcpy(&bits, &y, 4);
  return bits & 0x7FFFFFFF;
}

struct Cut {
  uint32_t key;   // of the last number that is kept
  double before;  // weight of all that is larger
};

// Walks down a scaled row until `target` of weight has been passed: by radix, three digits of a key.
template <class Weight>
Cut find_cut(const float* y, int64_t V, double target, const Weight& weight) {
  constexpr int kShifts[] = {20, 10, 0};
  constexpr uint32_t kDigits = 2048;
  Cut cut{0, 0.0};
  uint32_t known = 0;  // bits of the key that earlier digits have settled
  for (int shift : kShifts) {
    double weights[kDigits] = {};
    for (int64_t v = 0; v < V; v++) {
      uint32_t key = key_of(y[v]);
      if (key != kMinusInfinity && (key & known) == cut.key)
        weights[(key & ~known) >> shift] += weight(y[v]);
    }
    uint32_t digit = 0, last = 0;
    double before = cut.before;
    for (; digit < kDigits; digit++) {
      if (weights[digit] == 0) continue;
      last = digit;
      if (before + weights[digit] >= target) break;
      before += weights[digit];
    }
    if (digit == kDigits) before -= weights[last];  // rounding: the smallest there is
    cut = {cut.key | last << shift, before};
    known |= ~((1u << shift) - 1) & 0x7FFFFFFF;
  }
  return cut;
}

float from_key(uint32_t key) {
  key |= 0x80000000;
  float y;
  std::memcpy(&y, &key, 4);
  return y;
}

void keep_from(float* y, int64_t V, float lowest) {
  for (int64_t v = 0; v < V; v++) y[v] = y[v] >= lowest ? y[v] : kNone;
}

void keep_top_k(float* y, int64_t V, int64_t k) {
  if (k <= 0 || k >= V) return;
  Cut cut = find_cut(y, V, static_cast<double>(k), [](float) { return 1.0; });
  keep_from(y, V, from_key(cut.key));
}

void keep_top_p(float* y, int64_t V, double p) {
  if (!(p < 1)) return;
  auto weight = [](float x) { return static_cast<double>(exp_scalar(x)); };
  double total = 0;
  for (int64_t v = 0; v < V; v++) total += weight(y[v]);
  Cut cut = find_cut(y, V, p * total, weight);
  float lowest = from_key(cut.key);
  double room = p * total - cut.before;  // for numbers equal to the lowest, lowest ids first
  for (int64_t v = 0; v < V; v++) {
    if (y[v] == lowest && room > 0)
      room -= weight(lowest);
    else if (!(y[v] > lowest))
      y[v] = kNone;
  }
}

// A token by max(p - q, 0); q null is all on `draft`. By p where nothing is left of it.
int64_t residual(const float* y, const float* q, int64_t draft, double total, int64_t V,
                 const Noise& noise) {
  for (bool leftover : {true, false}) {
    double best = kNone;
    int64_t chosen = -1;
    uint32_t words[kBlock];
    for (int64_t v = 0; v < V; v++) {
      if (v % kBlock == 0) noise.words64(static_cast<uint32_t>(v / kBlock), words);
      double p = exp_scalar(y[v]) / total, taken = q ? q[v] : v == draft;
      double rest = leftover ? p - taken : p;
      if (!(rest > 0)) continue;
      double value = std::log(rest) + Noise::to_gumbel(words[v % kBlock]);
      if (value > best) {
        best = value;
        chosen = v;
      }
    }
    if (chosen >= 0) return chosen;
  }
  return draft;  // unreachable: p sums to 1
}

}  // namespace

void process_logits(float* out, const float* logits, const int32_t* token_ids,
                    const int32_t* query_len, const int32_t* state_rows, const void* settings,
                    const int32_t* counts, const uint8_t* in_prompt, const int32_t* bias_ids,
                    const float* bias_values, const int32_t* mask, int64_t T, int64_t V,
                    int64_t max_bias) {
  Problem p{static_cast<const Settings*>(settings),
            token_ids, counts, in_prompt, bias_ids, bias_values,
            reinterpret_cast<const uint32_t*>(mask), V, max_bias};
  launch(T * V, [=](const Team& team) {
    for (int64_t row = team.begin(T); row < team.end(T); row++) {
      int64_t request = row / query_len[0], offset = row % query_len[0], state = state_rows[request];
      const Settings& s = p.settings[state];
      const int32_t* drafts = p.token_ids + request * query_len[0] + 1;
      float* x = out + row * V;
      bias_and_penalise(p, s, state, drafts, offset, logits + row * V, x);
      if (s.flags & kMask) apply_mask(p.mask + row * ((V + 31) / 32), x, V);
      float largest = max_of(x, V);
      if (s.temperature == 0 || largest == kNone) continue;  // greedy, or nothing to choose from
      scale(x, V, largest, s.temperature);
      keep_top_k(x, V, s.top_k);
      keep_top_p(x, V, s.top_p);
      if (s.min_p > 0) keep_from(x, V, std::log(s.min_p));
    }
  });
}

void sample_rows(int32_t* target_ids, const float* processed, const int32_t* positions,
                 const int32_t* query_len, const int32_t* state_rows, const void* settings,
                 int64_t T, int64_t V) {
  launch(T * V, [=](const Team& team) {
    for (int64_t row = team.begin(T); row < team.end(T); row++) {
      const Settings& s = static_cast<const Settings*>(settings)[state_rows[row / query_len[0]]];
      const float* x = processed + row * V;
      uint32_t position = static_cast<uint32_t>(positions[row] + 1);
      Noise noise{s.seed_low, s.seed_high, position, kTargetStream, s.choice};
      target_ids[row] = static_cast<int32_t>(
          s.temperature == 0 ? index_of(best_of(x, V), x, V) : gumbel_argmax(x, V, noise));
    }
  });
}

void reject_rows(int32_t* target_ids, const float* processed, const float* draft_probs,
                 const int32_t* token_ids, const int32_t* positions, const int32_t* query_len,
                 const int32_t* num_draft_tokens, const int32_t* has_draft_probs,
                 const int32_t* state_rows, const void* settings, int64_t T, int64_t V) {
  launch(T * V, [=](const Team& team) {
    for (int64_t row = team.begin(T); row < team.end(T); row++) {
      int64_t request = row / query_len[0], offset = row % query_len[0];
      const Settings& s = static_cast<const Settings*>(settings)[state_rows[request]];
      const float* y = processed + row * V;
      if (offset >= num_draft_tokens[request] || s.temperature == 0 || !(max_of(y, V) > kNone))
        continue;  // the sampler's own choice stands
      const float* q = has_draft_probs[request] ? draft_probs + row * V : nullptr;
      int64_t draft = token_ids[row + 1];
      uint32_t position = static_cast<uint32_t>(positions[row] + 1);
      Noise noise{s.seed_low, s.seed_high, position, kAcceptanceStream, s.choice};
      double total = normaliser(y, V), p = exp_scalar(y[draft]) / total;
      bool accepted = noise.uniform(draft) * (q ? q[draft] : 1.0) < p;
      noise.stream = kResidualStream;
      target_ids[row] =
          static_cast<int32_t>(accepted ? draft : residual(y, q, draft, total, V, noise));
    }
  });
}
