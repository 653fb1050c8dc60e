// How a kernel meets its threads: a body(team) that every thread of a team runs over its own share.
//
// launch() opens an OpenMP region, or joins the team that run_calls has already opened, or, for tiny
// work, runs on one thread alone. Bodies may meet any team size: bits never depend on it.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

#include "vec.h"

constexpr int64_t kMaxThreads = 256;
constexpr int64_t kSharedBytes = kMaxThreads * 32;

static ALWAYS_INLINE void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// What the threads of one team share: a barrier, and room for one kernel's partial results.
struct Shared {
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<int64_t> generation{0};
  alignas(64) char room[kSharedBytes];

  // Some hundred nanoseconds; libgomp's takes a system call sooner. Yields where cores are short.
  void wait(int64_t size) {
    constexpr int64_t kSpins = 20000;
    int64_t now = generation.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      generation.store(now + 1, std::memory_order_release);
      return;
    }
    for (int64_t i = 0; generation.load(std::memory_order_acquire) == now; i++)
      if (i < kSpins) {
        cpu_relax();
      } else {
        sched_yield();
      }
  }
};

struct Team {
  int64_t tid;
  int64_t size;
  Shared* shared;
  void barrier() const {
    if (size > 1) shared->wait(size);
  }
  void* room() const { return shared->room; }
  // The half-open share [begin, end) of `count` equal tasks.
  int64_t begin(int64_t count) const { return count * tid / size; }
  int64_t end(int64_t count) const { return count * (tid + 1) / size; }
};

// Set on every thread of run_calls' region, null elsewhere.
inline thread_local const Team* current_team = nullptr;

inline int64_t team_threads() {
  int64_t threads = omp_get_max_threads();
  return threads < kMaxThreads ? threads : kMaxThreads;
}

// Runs body(team) on every thread of a new OpenMP region.
template <class Body>
inline void open_team(int64_t threads, const Body& body) {
  Shared shared;
  if (threads == 1) {
    body(Team{0, 1, &shared});
    return;
  }
#pragma omp parallel num_threads(threads)
  body(Team{omp_get_thread_num(), omp_get_num_threads(), &shared});
}

// Fork and join cost some microseconds: work below this many multiply-adds stays on one thread.
constexpr int64_t kSerialWork = 16384;

// No work, no call: bodies need not expect sizes of 0. All threads of a team see the same `work`.
template <class Body>
inline void launch(int64_t work, const Body& body) {
  if (work <= 0) return;
  const Team* team = current_team;
  if (!team) {
    open_team(work < kSerialWork ? 1 : team_threads(), body);
    return;
  }
  if (work >= kSerialWork) {
    body(*team);
  } else if (team->tid == 0) {
    body(Team{0, 1, team->shared});
  }
  team->barrier();
}
