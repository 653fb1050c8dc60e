// The exported C functions. Every argument is a pointer or an int64, at most MAX_NATIVE_ARGS, so that
// a recorded call is a function pointer and int64 words (program.cpp). Suffix: stored dtype of weights
// and cache; activations are always float. library.py holds the same table for Python.
//
// Pointers travel as int64: run_calls and ctypes call each function as one of int64 words alone. C++
// leaves that open; the 64-bit calling conventions of x86 and ARM pass both kinds alike, and the
// kernels are for those. A call in which a size is 0 writes nothing.
#pragma once
#include <cstdint>

#include "vec.h"

static_assert(sizeof(void*) == sizeof(int64_t), "pointers travel as int64");

#define EXPORT extern "C" __attribute__((visibility("default")))

#define DECLARE_TYPED(T, SUFFIX)                                                                   \
  EXPORT void linear_##SUFFIX(float* out, const float* x, const T* w, const float* bias,           \
                              int64_t M, int64_t N, int64_t K, int64_t accumulate);                \
  EXPORT void gate_up_##SUFFIX(float* out, const float* x, const T* w, int64_t M, int64_t I,       \
                               int64_t K);                                                         \
  EXPORT void embed_##SUFFIX(float* out, const T* table, const int32_t* ids, int64_t M,            \
                             int64_t H);                                                           \
  EXPORT void rope_write_##SUFFIX(float* qkv, T* kv_cache, const float* cos, const float* sin,     \
                                  const int32_t* positions, const int32_t* slot_mapping,           \
                                  int64_t T_, int64_t Hq, int64_t Hkv, int64_t D,                  \
                                  int64_t block_size, const float* q_norm_weight,                  \
                                  const float* k_norm_weight, const float* eps);                   \
  EXPORT void paged_attention_##SUFFIX(                                                            \
      float* out, const float* qkv, const T* kv_cache, const int32_t* block_table,                 \
      const int32_t* query_start_loc, const int32_t* positions, int64_t R, int64_t table_stride,   \
      int64_t Hq, int64_t Hkv, int64_t D, int64_t block_size, int64_t sliding_window,              \
      float* scratch, int64_t scratch_floats);                                                     \
  EXPORT void store_slots_##SUFFIX(T* cache, const float* x, const int32_t* slots, int64_t T_,     \
                                   int64_t H, int64_t width, int64_t column,                       \
                                   int64_t num_null_slots);                                        \
  EXPORT void load_slots_##SUFFIX(float* out, const T* cache, const int32_t* slots, int64_t T_,    \
                                  int64_t width);

DECLARE_TYPED(bf16, bf16)
DECLARE_TYPED(float, f32)
#undef DECLARE_TYPED

EXPORT void rms_norm(float* out, const float* x, const float* weight, int64_t M, int64_t H,
                     const float* eps);
EXPORT void argmax_rows(int32_t* out, const float* logits, int64_t M, int64_t V);
EXPORT void greedy_verify(int32_t* packed, const int32_t* target_ids, const int32_t* token_ids,
                          const int32_t* query_len, const int32_t* num_draft_tokens,
                          const int32_t* stop_ids, const int32_t* max_new_tokens, int64_t rows,
                          int64_t width, int64_t num_stop_ids);
EXPORT void prepare_rows(int32_t* token_ids, int32_t* positions, int32_t* slot_mapping,
                         int32_t* num_draft_tokens, int32_t* max_new_tokens,
                         const int32_t* state_rows, const int32_t* allowed_drafts,
                         const int32_t* most_new_tokens, const int32_t* draft_token_ids,
                         const int32_t* block_table, const int32_t* num_tokens,
                         const int32_t* limits, const int32_t* history, int64_t num_rows, int64_t R,
                         int64_t query_len, int64_t max_model_len, int64_t table_stride,
                         int64_t block_size, int64_t padding_row);
EXPORT void commit_rows(int32_t* history, int32_t* num_tokens, int32_t* counts,
                        const int32_t* packed, const int32_t* state_rows, const void* settings,
                        int64_t R, int64_t width, int64_t max_model_len, int64_t V,
                        int64_t padding_row);
EXPORT void prepare_window(int32_t* token_ids, int32_t* positions, int32_t* slot_mapping,
                           int32_t* last_rows, int32_t* loop_positions, int32_t* loop_slots,
                           int32_t* requests, const int32_t* state_rows,
                           const int32_t* allowed_drafts, const int32_t* filled,
                           const int32_t* block_table, const int32_t* num_tokens,
                           const int32_t* history, const void* rules, int64_t R,
                           int64_t query_len, int64_t max_model_len, int64_t table_stride,
                           int64_t block_size, int64_t padding_row);
EXPORT void process_logits(float* out, const float* logits, const int32_t* token_ids,
                           const int32_t* query_len, const int32_t* state_rows,
                           const void* settings, const int32_t* counts, const uint8_t* in_prompt,
                           const int32_t* bias_ids, const float* bias_values, const int32_t* mask,
                           int64_t T, int64_t V, int64_t max_bias);
EXPORT void sample_rows(int32_t* target_ids, const float* processed, const int32_t* positions,
                        const int32_t* query_len, const int32_t* state_rows, const void* settings,
                        int64_t T, int64_t V);
EXPORT void reject_rows(int32_t* target_ids, const float* processed, const float* draft_probs,
                        const int32_t* token_ids, const int32_t* positions,
                        const int32_t* query_len, const int32_t* num_draft_tokens,
                        const int32_t* has_draft_probs, const int32_t* state_rows,
                        const void* settings, int64_t T, int64_t V);
EXPORT void row_logprobs(int32_t* ids, float* values, int32_t* ranks, const float* logits,
                         const int32_t* target_ids, int64_t T, int64_t V, int64_t width);
EXPORT void take_rows(float* out, const float* x, const int32_t* rows, int64_t R, int64_t H);
EXPORT void zero_first(float* out, const int32_t* positions, int64_t T, int64_t H);
EXPORT void concat_rows(float* out, const float* a, const float* b, int64_t T, int64_t A, int64_t B);
EXPORT void shift_tokens(int32_t* out, const int32_t* token_ids, const int32_t* last_rows,
                         const int32_t* newest, int64_t R, int64_t width);
EXPORT void choose_drafts(int32_t* chosen, int32_t* drafts, float* probs, float* logits,
                          const int32_t* tokens, const void* requests, int64_t R, int64_t V,
                          int64_t target_vocab, int64_t query_len, int64_t step, int64_t sampling);
EXPORT void run_calls(const int64_t* program, int64_t n_calls);
EXPORT int64_t vector_lanes();
EXPORT int64_t rounds_activations();
