// run_calls: replays a recorded list of kernel calls without Python between them.
#include <array>
#include <utility>

#include "abi.h"
#include "team.h"

namespace {

// The build hands over the encoder's maximum (capture/ops.py), so the format has one owner.
constexpr int64_t kMaxArgs = MAX_NATIVE_ARGS;
constexpr int64_t kStride = 2 + kMaxArgs;  // [function, number of arguments, arguments, zeros]

using Invoke = void (*)(const int64_t* call);

template <size_t>
using Word = int64_t;

template <size_t... I>
void invoke_with(const int64_t* call, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(Word<I>...)>(call[0])(call[2 + I]...);
}

template <size_t N>
void invoke_n(const int64_t* call) {
  invoke_with(call, std::make_index_sequence<N>());
}

// One entry for each number of arguments, from 0 to the maximum.
template <size_t... N>
constexpr std::array<Invoke, sizeof...(N)> invokes(std::index_sequence<N...>) {
  return {invoke_n<N>...};
}

void invoke(const int64_t* call) {
  static constexpr auto kInvokes = invokes(std::make_index_sequence<kMaxArgs + 1>());
  kInvokes[call[1]](call);
}

// Kernels that join an open team. Anything else in a program runs on the calling thread, outside.
bool joins_team(int64_t function) {
#define SAME(name) function == reinterpret_cast<int64_t>(&name)
#define SAME_TYPED(name) (SAME(name##_bf16) || SAME(name##_f32))
  return SAME_TYPED(linear) || SAME_TYPED(gate_up) || SAME_TYPED(paged_attention) ||
         SAME_TYPED(rope_write) || SAME_TYPED(embed) || SAME(rms_norm) || SAME(argmax_rows);
}

}  // namespace

// One OpenMP region serves a whole run of kernels: a barrier between two calls instead of a join and
// a fork. Every thread walks the same program; launch() gives each its share.
void run_calls(const int64_t* program, int64_t n_calls) {
  int64_t threads = team_threads();
  for (int64_t i = 0; i < n_calls;) {
    int64_t end = i;
    while (end < n_calls && joins_team(program[end * kStride])) end++;
    if (end - i < 2 || threads == 1) {
      end = end == i ? i + 1 : end;
      for (; i < end; i++) invoke(program + i * kStride);
      continue;
    }
    open_team(threads, [=](const Team& team) {
      current_team = &team;
      for (int64_t j = i; j < end; j++) invoke(program + j * kStride);
      current_team = nullptr;
    });
    i = end;
  }
}

int64_t vector_lanes() { return VL; }
