// The pool. Work is a number of pieces and a function. Every thread has a range of the pieces and takes them in order, so
// that it reads memory in one long run, as the hardware that fetches ahead likes it; one whose range is done takes the last
// of another's. A range is one atomic word with the number of the job, so a thread that wakes late takes nothing of a job
// that has ended, and nobody waits for a thread that has taken nothing: on a busy machine one may not run for
// milliseconds.
#include "pool.h"
#include "waiting.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
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

constexpr int RANGES = 256;             // threads with a range of their own; more only help
constexpr int BITS = 18;                // of a piece's number
constexpr uint64_t PIECES = 1 << BITS;  // fewer than these

// Pieces [begin, end) that nobody has taken: number of the job, begin, end.
struct alignas(64) Range {
  std::atomic<uint64_t> word{0};

  static uint64_t make(uint64_t job, uint64_t begin, uint64_t end) { return (job << BITS | begin) << BITS | end; }

  // The first or the last of them; -1 where there is none.
  int64_t take(bool first) {
    uint64_t now = word.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t begin = now >> BITS & (PIECES - 1), end = now & (PIECES - 1);
      if (begin == end) return -1;
      const uint64_t then = first ? now + PIECES : now - 1;
      if (word.compare_exchange_weak(now, then, std::memory_order_acq_rel)) return int64_t(first ? begin : end - 1);
    }
  }
};

struct Pool {
  Range ranges[RANGES];
  std::mutex busy;                    // one caller at a time
  uint64_t job = 0;
  std::atomic<int32_t> in_use{1};     // ranges of the present job
  std::atomic<int64_t> unfinished{0}; // pieces that are not done
  std::atomic<uint32_t> bell{0};      // changes with every job
  std::atomic<int32_t> asleep{0};
  std::atomic<int32_t> helpers{0};    // threads that may help with the present job
  void (*work)(void *, int64_t) = nullptr;
  void *context = nullptr;
  int started = 0;
};

Pool *pool = new Pool;  // never destroyed: its threads outlive static destruction

// Takes pieces of the present job, those of range `own` first, until none is left.
void help(int own) {
  const int ranges = pool->in_use.load(std::memory_order_acquire);
  for (int i = 0; i < ranges; i++) {
    Range &range = pool->ranges[(own + i) % ranges];
    // A piece that is taken keeps its job alive, so what the caller wrote is still there.
    for (int64_t piece; (piece = range.take(i == 0)) >= 0;) {
      pool->work(pool->context, piece);
      pool->unfinished.fetch_sub(1, std::memory_order_release);
    }
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
    if (number < pool->helpers.load(std::memory_order_acquire)) help(number + 1);
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
  if (threads <= 1 || pieces <= 1 || uint64_t(pieces) >= PIECES || !lock.try_lock()) {
    for (int64_t i = 0; i < pieces; i++) work(context, i);
    return;
  }
  start(threads - 1);
  pool->work = work;
  pool->context = context;
  pool->helpers.store(threads - 1, std::memory_order_relaxed);
  pool->unfinished.store(pieces, std::memory_order_relaxed);
  const int ranges = std::min(threads, RANGES);
  pool->in_use.store(ranges, std::memory_order_relaxed);
  pool->job++;
  for (int r = 0; r < ranges; r++)
    pool->ranges[r].word.store(Range::make(pool->job, uint64_t(pieces * r / ranges), uint64_t(pieces * (r + 1) / ranges)),
                               std::memory_order_release);
  pool->bell.fetch_add(1);
#if defined(__linux__)
  if (pool->asleep.load() > 0) syscall(SYS_futex, &pool->bell, FUTEX_WAKE_PRIVATE, threads - 1, nullptr, nullptr, 0);
#endif
  help(0);
  for (int looks = 0; pool->unfinished.load(std::memory_order_acquire) > 0; looks++)
    looks < YIELD_AFTER ? pause() : void(sched_yield());
}

}  // namespace oddrank
