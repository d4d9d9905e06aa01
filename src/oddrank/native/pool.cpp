// The pool. Work is a number of pieces and a function; threads take pieces until none is left. What is left is one
// atomic word with the number of the job, so a thread that wakes late takes nothing of a job that has ended, and nobody
// waits for a thread that has taken nothing: on a busy machine a thread may not run for milliseconds.
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <climits>
#include <mutex>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace oddrank {
namespace {

constexpr int64_t SPIN_NS = 60000;  // how long a thread without work looks for some before it sleeps: a few layers' gaps
constexpr int YIELD_AFTER = 2000;   // pauses, before whoever waits for the last piece lets others have its core

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

struct Pool {
  std::mutex busy;                    // one caller at a time
  std::atomic<uint64_t> left{0};      // number of the job << 32 | pieces that nobody has taken
  std::atomic<int64_t> unfinished{0}; // pieces that are not done
  std::atomic<uint32_t> bell{0};      // changes with every job
  std::atomic<int32_t> asleep{0};
  std::atomic<int32_t> helpers{0};    // threads that may help with the present job
  void (*work)(void *, int64_t) = nullptr;
  void *context = nullptr;
  int64_t pieces = 0;
  int started = 0;
};

Pool *pool = new Pool;  // never destroyed: its threads outlive static destruction

// Takes pieces of the present job until none is left.
void help() {
  uint64_t word = pool->left.load(std::memory_order_acquire);
  while (uint32_t(word)) {
    if (!pool->left.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel)) continue;
    // A piece that is taken keeps its job alive, so what the caller wrote is still there.
    pool->work(pool->context, pool->pieces - int64_t(uint32_t(word)));
    pool->unfinished.fetch_sub(1, std::memory_order_release);
    word = pool->left.load(std::memory_order_acquire);
  }
}

void sleep_until_rung(uint32_t seen) {
#if defined(__linux__)
  pool->asleep.fetch_add(1);
  if (pool->bell.load() == seen) syscall(SYS_futex, &pool->bell, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  pool->asleep.fetch_sub(1);
#else
  (void)seen;
  timespec t = {0, 200000};
  nanosleep(&t, nullptr);
#endif
}

void *thread_main(void *argument) {
  const int number = int(reinterpret_cast<intptr_t>(argument));
  uint32_t seen = 0;
  for (;;) {
    int64_t until = now() + SPIN_NS;
    int looks = 0;
    while (pool->bell.load(std::memory_order_acquire) == seen) {
      pause();
      if (++looks % 64 == 0 && now() > until) {
        sleep_until_rung(seen);
        break;
      }
    }
    seen = pool->bell.load(std::memory_order_acquire);
    if (number < pool->helpers.load(std::memory_order_acquire)) help();
  }
  return nullptr;
}

void start(int wanted) {
  while (pool->started < wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int failed =
        pthread_create(&thread, &attributes, thread_main, reinterpret_cast<void *>(intptr_t(pool->started)));
    pthread_attr_destroy(&attributes);
    if (failed) return;  // the caller computes with those there are
    pool->started++;
  }
}

void forget_threads() { pool = new Pool; }  // a forked child has none of them

const int registered = pthread_atfork(nullptr, nullptr, forget_threads);

}  // namespace

void share(int threads, int64_t pieces, void (*work)(void *, int64_t), void *context) {
  (void)registered;
  std::unique_lock<std::mutex> lock(pool->busy, std::defer_lock);
  if (threads <= 1 || pieces <= 1 || pieces >= INT_MAX || !lock.try_lock()) {
    for (int64_t i = 0; i < pieces; i++) work(context, i);
    return;
  }
  start(threads - 1);
  pool->work = work;
  pool->context = context;
  pool->pieces = pieces;
  pool->helpers.store(threads - 1, std::memory_order_relaxed);
  pool->unfinished.store(pieces, std::memory_order_relaxed);
  const uint64_t job = (pool->left.load(std::memory_order_relaxed) >> 32) + 1;
  pool->left.store(job << 32 | uint64_t(pieces), std::memory_order_release);
  pool->bell.fetch_add(1);
#if defined(__linux__)
  if (pool->asleep.load() > 0) syscall(SYS_futex, &pool->bell, FUTEX_WAKE_PRIVATE, threads - 1, nullptr, nullptr, 0);
#endif
  help();
  for (int looks = 0; pool->unfinished.load(std::memory_order_acquire) > 0; looks++)
    looks < YIELD_AFTER ? pause() : void(sched_yield());
}

}  // namespace oddrank
