// Threads that go through the phases of a computation together: one parallel region for all of them, since starting one
// costs as much as a small phase.
#pragma once

#include <atomic>
#include <thread>

#include "launch.h"

namespace mtp::cpu {

class Member;

// What the members share. No member waits for a thread that has not started: whoever is there takes all the tasks.
//
// The tasks of a phase are dealt out in runs, one a member, so that what a thread reads lies together; who has finished
// a run goes on with the others'.
class Team {
  friend class Member;

 public:
  explicit Team(int64_t threads) : runs_(std::clamp<int64_t>(threads, 1, kMostRuns)) {}

 private:
  static constexpr int64_t kMostRuns = 16;
  static constexpr int kPhaseShift = 32;
  struct alignas(64) Run {
    std::atomic<uint64_t> next{0};  // the phase, and the first task of the run that nobody has taken, from 0
  };
  Run run_[kMostRuns];  // a phase is over when the first one says so
  const int64_t runs_;
  alignas(64) std::atomic<int64_t> done_{0};  // tasks of the phase that are finished
  std::atomic<int64_t> members_{0};
};

// One thread's way through the phases; every member calls `each` with the same numbers of tasks.
class Member {
 public:
  Member() = default;
  explicit Member(Team& team) : team_(&team), index_(team.members_.fetch_add(1)) {}

  // Below the number of threads that run_team was asked for.
  int64_t index() const { return index_; }

  // Calls body(task) for the tasks that this thread gets, and returns when all threads have done theirs. The body must
  // not throw: the others would wait for ever.
  template <class Body>
  void each(int64_t tasks, const Body& body) {
    if (!team_) {
      for (int64_t task = 0; task < tasks; ++task) {
        body(task);
      }
      return;
    }
    if (tasks == 0) {
      return;
    }
    const uint64_t phase = phase_++;
    const int64_t runs = team_->runs_;
    for (int64_t i = 0; i < runs; ++i) {
      const int64_t run = (index_ + i) % runs;
      const int64_t begin = tasks * run / runs;
      const int64_t size = tasks * (run + 1) / runs - begin;
      for (int64_t task = take(phase, run, size); task >= 0; task = take(phase, run, size)) {
        body(begin + task);
        if (team_->done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
          end(phase);
          return;
        }
      }
    }
    wait(phase);
  }

 private:
  // The next task of a run of `size` tasks, or -1.
  int64_t take(uint64_t phase, int64_t run, int64_t size) const {
    std::atomic<uint64_t>& next = team_->run_[run].next;
    uint64_t seen = next.load(std::memory_order_acquire);
    while (seen >> Team::kPhaseShift == phase && static_cast<int64_t>(seen & 0xffffffffu) < size) {
      if (next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return static_cast<int64_t>(seen & 0xffffffffu);
      }
    }
    return -1;
  }

  // Opens the next phase; the first run last, since that is where the others look.
  void end(uint64_t phase) const {
    team_->done_.store(0, std::memory_order_relaxed);
    for (int64_t run = team_->runs_; run-- > 0;) {
      team_->run_[run].next.store((phase + 1) << Team::kPhaseShift, std::memory_order_release);
    }
  }

  void wait(uint64_t phase) const {
    constexpr int kSpins = 4096;  // some tens of microseconds; longer, and the other thread may need this core
    const std::atomic<uint64_t>& next = team_->run_[0].next;
    for (int spins = 0; next.load(std::memory_order_acquire) >> Team::kPhaseShift == phase; ++spins) {
      if (spins >= kSpins) {
        std::this_thread::yield();
        continue;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#endif
    }
  }

  Team* team_ = nullptr;  // null: alone
  int64_t index_ = 0;
  uint64_t phase_ = 0;
};

// Calls program(member) on at most `threads` of torch's threads.
template <class Program>
void run_team(int64_t threads, const Program& program) {
  if (threads <= 1) {
    Member alone;
    program(alone);
    return;
  }
  Team team(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Member member(team);
    program(member);
  });
}

// Threads that are worth starting for so many products.
inline int64_t threads_for(int64_t products) {
  // One row of 256, bf16, 2 cores: 196608 products take 9 us on one thread and 7 on two; 65536 take 2 us on one.
  constexpr int64_t kProductsPerThread = 65536;
  return std::clamp<int64_t>(products / kProductsPerThread, 1, std::max<int64_t>(1, torch::stable::get_num_threads()));
}

// Cuts one allocation into arrays, each from a cache line's start. Without a base it only counts.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kLine = 64;
    T* array = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kLine - 1) / kLine * kLine;
    return array;
  }

  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

// Runs one program: its workspace is cut by program.place(carver), program.products() says how much work it is.
template <class Program>
void run_alone(Program& program) {
  Carver count(nullptr);
  program.place(count);
  const Tensor workspace = empty({std::max<int64_t>(1, count.bytes())}, aoti_torch_dtype_uint8());
  Carver carver(data<char>(workspace));
  program.place(carver);
  run_team(threads_for(program.products()), [&](Member& member) { program.run(member); });
}

}  // namespace mtp::cpu
