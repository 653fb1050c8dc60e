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

}  // namespace

void run_calls(const int64_t* program, int64_t n_calls) {
  for (int64_t i = 0; i < n_calls; i++) invoke(program + i * kStride);
}

int64_t vector_lanes() { return VL; }
