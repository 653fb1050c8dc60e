// A step's first and last kernel: its inputs out of the requests' rows, and the rows brought up to date
// by what it emits. Integers alone; the rule once more, in numpy, is tests/graphengine/kernels/test_request_rows.py.
#include <algorithm>

#include "abi.h"
#include "settings.h"

// A live request has its last token and then its drafts, as far as its limit and its blocks go; every
// other row carries token 0 in the null block. `num_rows` >= R entries of the counts are written.
void prepare_rows(int32_t* token_ids, int32_t* positions, int32_t* slot_mapping,
                  int32_t* num_draft_tokens, int32_t* max_new_tokens, const int32_t* state_rows,
                  const int32_t* allowed_drafts, const int32_t* most_new_tokens,
                  const int32_t* draft_token_ids, const int32_t* block_table,
                  const int32_t* num_tokens, const int32_t* limits, const int32_t* history,
                  int64_t num_rows, int64_t R, int64_t query_len, int64_t max_model_len,
                  int64_t table_stride, int64_t block_size, int64_t padding_row) {
  for (int64_t i = 0; i < num_rows; i++) {
    int64_t row = i < R ? state_rows[i] : padding_row;
    int32_t room = row == padding_row ? 0 : std::max(limits[row] - num_tokens[row], 0);
    int32_t drafts = std::min(allowed_drafts[i], std::max(room - 1, 0));
    num_draft_tokens[i] = row == padding_row ? 0 : drafts;
    max_new_tokens[i] = row == padding_row ? 1 : std::min(room, most_new_tokens[i]);
    for (int64_t j = 0; i < R && j < query_len; j++) {
      int64_t t = i * query_len + j;
      bool live = room > 0 && j <= drafts;
      int64_t last = row == padding_row ? 0 : num_tokens[row] - 1;
      int64_t position = row == padding_row ? 0 : std::min(last + j, max_model_len - 1);
      int64_t block = block_table[i * table_stride + position / block_size];
      int32_t known = j == 0 ? history[row * max_model_len + last] : draft_token_ids[t - 1];
      token_ids[t] = live ? known : 0;
      positions[t] = static_cast<int32_t>(position);
      slot_mapping[t] = live ? static_cast<int32_t>(block * block_size + position % block_size) : 0;
    }
  }
}

// packed [num_rows, width], as greedy_verify writes it: what each request emits joins its row.
void commit_rows(int32_t* history, int32_t* num_tokens, int32_t* counts, const int32_t* packed,
                 const int32_t* state_rows, const void* settings, int64_t R, int64_t width,
                 int64_t max_model_len, int64_t V, int64_t padding_row) {
  for (int64_t i = 0; i < R; i++) {
    int64_t row = state_rows[i];
    if (row == padding_row) continue;
    const int32_t* emitted = packed + i * width + 2;
    bool counted = static_cast<const Settings*>(settings)[row].flags & kPenalties;
    for (int32_t j = 0; j < packed[i * width]; j++) {
      history[row * max_model_len + num_tokens[row]++] = emitted[j];
      if (counted) counts[row * V + emitted[j]]++;
    }
  }
}
