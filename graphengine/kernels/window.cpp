// The first kernel of a chain of drafts: its rows out of the requests' rows, as rows.cpp makes the
// target's. Integers alone; the rule once more, in numpy, is tests/graphengine/kernels/test_window.py.
#include <algorithm>

#include "abi.h"

namespace {

// What a chain is, the same for every call; proposers/model_based.py writes it.
struct Rules {
  int32_t width;           // rows a request of the window
  int32_t shift;           // how far behind its slot the token of a row is
  int32_t num_embeddings;  // ids from here on are embedded as the last id
  int32_t loop_rows[];     // by the number of drafts: how many of them are run on
};

constexpr int64_t kRequestWords = 5;  // of DraftRequest in draft.cpp
constexpr int64_t kPositionWord = 4;

}  // namespace

// A request that drafts has the slots of the window that are not filled, the last one at any rate, and
// behind them a place for each draft that is run on; every other row carries token 0 in the null block.
// The window must reach what is filled, and there must be a token for its last row: the host's to know.
void prepare_window(int32_t* token_ids, int32_t* positions, int32_t* slot_mapping,
                    int32_t* last_rows, int32_t* loop_positions, int32_t* loop_slots,
                    int32_t* requests, const int32_t* state_rows, const int32_t* allowed_drafts,
                    const int32_t* filled, const int32_t* block_table, const int32_t* num_tokens,
                    const int32_t* history, const void* rules, int64_t R, int64_t query_len,
                    int64_t max_model_len, int64_t table_stride, int64_t block_size,
                    int64_t padding_row) {
  const Rules& rule = *static_cast<const Rules*>(rules);
  for (int64_t i = 0; i < R; i++) {
    int64_t row = state_rows[i];
    int32_t drafts = row == padding_row ? 0 : allowed_drafts[i];
    int64_t known = drafts > 0 ? num_tokens[row] : 0;
    int64_t end = drafts > 0 ? known - rule.shift : 0;
    // Rows of drafts that were not accepted are filled in vain, but none of them is before the last.
    int64_t first = std::max<int64_t>({end - rule.width, 0, filled[i]});
    int64_t start = drafts > 0 ? std::min(first, end - 1) : 0;
    auto slot_of = [&](int64_t position) {
      int64_t block = block_table[i * table_stride + position / block_size];
      return static_cast<int32_t>(block * block_size + position % block_size);
    };
    for (int64_t j = 0; j < rule.width; j++) {
      int64_t t = i * rule.width + j, slot = start + j;
      bool live = slot < end;
      token_ids[t] =
          live ? std::min(history[row * max_model_len + slot + rule.shift], rule.num_embeddings - 1)
               : 0;
      positions[t] = live ? static_cast<int32_t>(slot) : 0;
      slot_mapping[t] = live ? slot_of(slot) : 0;
    }
    last_rows[i] = static_cast<int32_t>(i * rule.width + std::max<int64_t>(end - start, 1) - 1);
    requests[i * kRequestWords + kPositionWord] = static_cast<int32_t>(known);
    int32_t loop_rows = drafts > 0 ? rule.loop_rows[drafts] : 0;
    for (int64_t step = 0; step < query_len; step++) {
      int64_t position = drafts > 0 ? std::min(end + step, max_model_len - 1) : 0;
      loop_positions[step * R + i] = static_cast<int32_t>(position);
      loop_slots[step * R + i] = step < loop_rows ? slot_of(position) : 0;
    }
  }
}
