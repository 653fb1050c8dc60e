// run_calls: replays a recorded list of kernel calls without Python between them.
#include "abi.h"
#include "team.h"

namespace {

constexpr int64_t kStride = 22;  // [function, nargs, up to 20 arguments]

using W = int64_t;
void invoke(const W* c) {
  const W* a = c + 2;
  void* f = reinterpret_cast<void*>(c[0]);
#define W4 W, W, W, W
#define A4(i) a[i], a[i + 1], a[i + 2], a[i + 3]
#define CASE(n, types, ...)                             \
  case n:                                               \
    reinterpret_cast<void (*) types>(f)(__VA_ARGS__); \
    return;
  switch (c[1]) {
    CASE(1, (W), a[0])
    CASE(2, (W, W), a[0], a[1])
    CASE(3, (W, W, W), a[0], a[1], a[2])
    CASE(4, (W4), A4(0))
    CASE(5, (W4, W), A4(0), a[4])
    CASE(6, (W4, W, W), A4(0), a[4], a[5])
    CASE(7, (W4, W, W, W), A4(0), a[4], a[5], a[6])
    CASE(8, (W4, W4), A4(0), A4(4))
    CASE(9, (W4, W4, W), A4(0), A4(4), a[8])
    CASE(10, (W4, W4, W, W), A4(0), A4(4), a[8], a[9])
    CASE(11, (W4, W4, W, W, W), A4(0), A4(4), a[8], a[9], a[10])
    CASE(12, (W4, W4, W4), A4(0), A4(4), A4(8))
    CASE(13, (W4, W4, W4, W), A4(0), A4(4), A4(8), a[12])
    CASE(14, (W4, W4, W4, W, W), A4(0), A4(4), A4(8), a[12], a[13])
    CASE(15, (W4, W4, W4, W, W, W), A4(0), A4(4), A4(8), a[12], a[13], a[14])
    CASE(16, (W4, W4, W4, W4), A4(0), A4(4), A4(8), A4(12))
    CASE(17, (W4, W4, W4, W4, W), A4(0), A4(4), A4(8), A4(12), a[16])
    CASE(18, (W4, W4, W4, W4, W, W), A4(0), A4(4), A4(8), A4(12), a[16], a[17])
    CASE(19, (W4, W4, W4, W4, W, W, W), A4(0), A4(4), A4(8), A4(12), a[16], a[17], a[18])
    CASE(20, (W4, W4, W4, W4, W4), A4(0), A4(4), A4(8), A4(12), A4(16))
  }
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
