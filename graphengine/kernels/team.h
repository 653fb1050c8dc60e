// How a kernel meets its threads: a body(team) that every thread of a team runs over its own share.
//
// launch() opens an OpenMP region, or joins the team that run_calls has already opened, or, for tiny
// work, runs on the calling thread alone. Bodies may use any team size: bits never depend on it.
#pragma once
#include <omp.h>

#include <cstdint>

constexpr int64_t kMaxThreads = 256;
constexpr int64_t kSharedBytes = kMaxThreads * 32;

struct Team {
  int64_t tid;
  int64_t size;
  void* shared;  // kSharedBytes that every thread of the team sees; a kernel's for its own duration
  void barrier() const {
    if (size > 1) {
#pragma omp barrier
    }
  }
  // The half-open share [begin, end) of `count` equal tasks.
  int64_t begin(int64_t count) const { return count * tid / size; }
  int64_t end(int64_t count) const { return count * (tid + 1) / size; }
};

// Set on every thread of run_calls' region, null elsewhere.
inline thread_local const Team* current_team = nullptr;

// Fork and join cost some microseconds: work below this many multiply-adds stays on one thread.
constexpr int64_t kSerialWork = 16384;

inline int team_threads() {
  int threads = omp_get_max_threads();
  return threads < kMaxThreads ? threads : kMaxThreads;
}

template <class Body>
inline void launch(int64_t work, const Body& body) {
  if (const Team* team = current_team) {
    if (work >= kSerialWork) {
      body(*team);
    } else if (team->tid == 0) {
      body(Team{0, 1, team->shared});
    }
    team->barrier();
    return;
  }
  alignas(64) char shared[kSharedBytes];
  int threads = team_threads();
  if (work < kSerialWork || threads == 1) {
    body(Team{0, 1, shared});
    return;
  }
#pragma omp parallel num_threads(threads)
  body(Team{omp_get_thread_num(), omp_get_num_threads(), shared});
}
