// What a chain of drafts needs beside the layers: rows picked, joined and kept by slot, and the choice
// of each draft. Rows are independent; the definitions are in tests/graphengine/kernels/test_draft.py.
#include <cmath>
#include <cstring>

#include "abi.h"
#include "argmax.h"
#include "noise.h"
#include "scaled.h"
#include "team.h"

namespace {

enum Sampling : int64_t { kGreedy = 0, kCoupled = 1, kProbabilistic = 2 };

// How a request's tokens are drawn: a row of proposers/requests.py, which has the same fields.
struct DraftRequest {
  float temperature;  // 0: greedy
  uint32_t seed_low, seed_high, choice;
  int32_t num_tokens;  // position of the first draft
};
static_assert(sizeof(DraftRequest) == 20, "no padding");

template <typename T>
void store_slots(T* cache, const float* x, const int32_t* slots, int64_t num_tokens, int64_t H,
                 int64_t width, int64_t column, int64_t num_null_slots) {
  launch(num_tokens * H, [=](const Team& team) {
    for (int64_t t = team.begin(num_tokens); t < team.end(num_tokens); t++) {
      if (slots[t] < num_null_slots) continue;  // of padding, which threads would write at once
      T* row = cache + slots[t] * width + column;
      for (int64_t i = 0; i < H; i++) from_float(x[t * H + i], row + i);
    }
  });
}

template <typename T>
void load_slots(float* out, const T* cache, const int32_t* slots, int64_t num_tokens, int64_t width) {
  launch(num_tokens * width, [=](const Team& team) {
    for (int64_t t = team.begin(num_tokens); t < team.end(num_tokens); t++) {
      const T* row = cache + slots[t] * width;
      for (int64_t i = 0; i < width; i++) out[t * width + i] = to_float(row[i]);
    }
  });
}

// Column of the draft's vocabulary to token of the target's.
int64_t token_of(const int32_t* tokens, int64_t column) { return tokens ? tokens[column] : column; }

// As gumbel_argmax, with the noise of the tokens that the columns stand for.
template <class Value>
int64_t noisy_argmax(const float* y, int64_t V, const int32_t* tokens, const Noise& noise,
                     const Value& value) {
  auto noisy = [&](int64_t v) {
    uint32_t four[4];
    int64_t token = token_of(tokens, v);
    noise.words(static_cast<uint32_t>(token / 4), four);
    return value(v) + Noise::to_gumbel(four[token % 4]);
  };
  Best top = best_of(y, V);
  if (top.index < 0) return index_of(top, y, V);
  int64_t chosen = top.index;
  double best = noisy(chosen);
  double slack = top.value - value(chosen) - 1e-3;  // what `value` is below y, but for rounding
  for (int64_t v = 0; v < V; v++) {
    if (y[v] - slack + kLargestGumbel < best || y[v] == kNone || v == top.index) continue;
    double candidate = noisy(v);
    if (candidate > best || (candidate == best && v < chosen)) {
      best = candidate;
      chosen = v;
    }
  }
  return chosen;
}

// Draws from softmax(y), rounded to float, which is written to `probs` [target's vocabulary].
int64_t draw(const float* y, int64_t V, const int32_t* tokens, const Noise& noise, float* probs,
             int64_t target_vocab) {
  double total = normaliser(y, V);
  std::memset(probs, 0, target_vocab * sizeof(float));
  auto probability = [&](int64_t v) { return static_cast<float>(exp_scalar(y[v]) / total); };
  for (int64_t v = 0; v < V; v++) probs[token_of(tokens, v)] = probability(v);
  return noisy_argmax(y, V, tokens, noise, [&](int64_t v) {
    return std::log(static_cast<double>(probability(v)));
  });
}

int64_t choose(float* x, int64_t V, const int32_t* tokens, const DraftRequest& request, int64_t step,
               int64_t sampling, float* probs, int64_t target_vocab) {
  Best top = best_of(x, V);
  bool greedy = sampling == kGreedy || request.temperature == 0 || top.index < 0;
  if (greedy) {
    int64_t chosen = index_of(top, x, V);
    if (sampling == kProbabilistic) {
      std::memset(probs, 0, target_vocab * sizeof(float));
      probs[token_of(tokens, chosen)] = 1.0f;
    }
    return chosen;
  }
  scale(x, V, top.value, request.temperature);
  Noise noise{request.seed_low, request.seed_high, static_cast<uint32_t>(request.num_tokens + step),
              sampling == kCoupled ? kTargetStream : kDraftStream, request.choice};
  if (sampling == kProbabilistic) return draw(x, V, tokens, noise, probs, target_vocab);
  if (!tokens) return gumbel_argmax(x, V, noise);
  return noisy_argmax(x, V, tokens, noise, [&](int64_t v) { return static_cast<double>(x[v]); });
}

}  // namespace

#define DEFINE_TYPED(T, SUFFIX)                                                                    \
  void store_slots_##SUFFIX(T* cache, const float* x, const int32_t* slots, int64_t T_, int64_t H, \
                            int64_t width, int64_t column, int64_t num_null_slots) {               \
    store_slots(cache, x, slots, T_, H, width, column, num_null_slots);                            \
  }                                                                                                \
  void load_slots_##SUFFIX(float* out, const T* cache, const int32_t* slots, int64_t T_,           \
                           int64_t width) {                                                        \
    load_slots(out, cache, slots, T_, width);                                                      \
  }

DEFINE_TYPED(bf16, bf16)
DEFINE_TYPED(float, f32)

void take_rows(float* out, const float* x, const int32_t* rows, int64_t R, int64_t H) {
  launch(R * H, [=](const Team& team) {
    for (int64_t r = team.begin(R); r < team.end(R); r++)
      std::memcpy(out + r * H, x + rows[r] * H, H * sizeof(float));
  });
}

void zero_first(float* out, const int32_t* positions, int64_t T, int64_t H) {
  launch(T * H, [=](const Team& team) {
    for (int64_t t = team.begin(T); t < team.end(T); t++)
      if (positions[t] == 0) std::memset(out + t * H, 0, H * sizeof(float));
  });
}

void concat_rows(float* out, const float* a, const float* b, int64_t T, int64_t A, int64_t B) {
  launch(T * (A + B), [=](const Team& team) {
    for (int64_t t = team.begin(T); t < team.end(T); t++) {
      std::memcpy(out + t * (A + B), a + t * A, A * sizeof(float));
      std::memcpy(out + t * (A + B) + A, b + t * B, B * sizeof(float));
    }
  });
}

void shift_tokens(int32_t* out, const int32_t* token_ids, const int32_t* last_rows,
                  const int32_t* newest, int64_t R, int64_t width) {
  launch(R * width, [=](const Team& team) {
    for (int64_t r = team.begin(R); r < team.end(R); r++)
      for (int64_t row = r * width; row < (r + 1) * width; row++)
        out[row] = row < last_rows[r] ? token_ids[row + 1] : row == last_rows[r] ? newest[r] : 0;
  });
}

void choose_drafts(int32_t* chosen, int32_t* drafts, float* probs, float* logits,
                   const int32_t* tokens, const void* requests, int64_t R, int64_t V,
                   int64_t target_vocab, int64_t query_len, int64_t step, int64_t sampling) {
  launch(R * V, [=](const Team& team) {
    for (int64_t r = team.begin(R); r < team.end(R); r++) {
      const DraftRequest& request = static_cast<const DraftRequest*>(requests)[r];
      float* q = probs ? probs + (r * query_len + step) * target_vocab : nullptr;
      int64_t column =
          choose(logits + r * V, V, tokens, request, step, sampling, q, target_vocab);
      chosen[r] = drafts[r * query_len + step] = static_cast<int32_t>(token_of(tokens, column));
    }
  });
}
