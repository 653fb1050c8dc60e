// Greedy verification: the rule of sampling/verifier.py, over the static buffers of all requests.
#include <algorithm>

#include "abi.h"

// packed [rows, width]: number of emitted tokens, how many of them were drafts, then their ids, -1
// beyond. A request's tokens start at row * query_len of target_ids and token_ids, whatever the cell.
void greedy_verify(int32_t* packed, const int32_t* target_ids, const int32_t* token_ids,
                   const int32_t* query_len, const int32_t* num_draft_tokens,
                   const int32_t* stop_ids, const int32_t* max_new_tokens, int64_t rows,
                   int64_t width, int64_t num_stop_ids) {
  for (int64_t row = 0; row < rows; row++) {
    const int32_t* targets = target_ids + row * query_len[0];
    const int32_t* inputs = token_ids + row * query_len[0];
    const int32_t* stops = stop_ids + row * num_stop_ids;
    int32_t* emitted = packed + row * width + 2;
    int32_t room = max_new_tokens[row], count = 0, accepted = 0;
    for (bool more = room > 0; more;) {
      int32_t token = targets[count];
      bool stop = std::find(stops, stops + num_stop_ids, token) != stops + num_stop_ids;
      bool confirmed = count < num_draft_tokens[row] && inputs[count + 1] == token;
      emitted[count++] = token;
      accepted += confirmed;
      more = confirmed && !stop && count < room;
    }
    emitted[-2] = count;
    emitted[-1] = accepted;
    std::fill(emitted + count, emitted + width - 2, -1);
  }
}
