#include "ranks.h"
#include "waiting.h"

#if defined(__linux__)

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace oddrank {
namespace {

constexpr int64_t LINE = 16;  // words of 8 bytes: two cache lines, which x86 fetches together
constexpr int64_t SEQUENCE = 0, SIGNATURE = 1, GONE = 3;  // words of a line; a signature for even and for odd steps
constexpr int64_t SPIN_NS = 100000, ALONE_NS = 4000;  // looking, and how much of it without offering the core to others
constexpr int YIELDS = 6;    // times a rank without a core of its own lets others run before it sleeps
constexpr timespec NAP = {0, 50000000};  // sleep after which a rank checks that those it waits for are alive

// A rank's view of the words and bytes of `memory` that the steps use.
struct Lines {
  Ranks &ranks;
  uint64_t *words = reinterpret_cast<uint64_t *>(ranks.memory);
  uint64_t *gate = words + ranks.size * LINE;
  uint8_t *sleepers = ranks.memory + (ranks.size + 1) * LINE * 8;

  uint64_t *line(int64_t rank) const { return words + rank * LINE; }
  uint64_t reached(int64_t rank) const { return __atomic_load_n(line(rank) + SEQUENCE, __ATOMIC_ACQUIRE); }

  // The first rank from `from` on that has not published `step`; `size` where all have.
  int64_t missing(uint64_t step, int64_t from = 0) const {
    while (from < ranks.size && (from == ranks.rank || reached(from) >= step)) from++;
    return from;
  }
  bool open(uint64_t step) const { return __atomic_load_n(gate, __ATOMIC_ACQUIRE) >= step; }

  void wake_sleepers(uint64_t step) const {
    bool any = false;
    for (int64_t r = 0; r < ranks.size; r++) any |= __atomic_load_n(sleepers + r, __ATOMIC_RELAXED) != 0;
    if (!any) return;
    __atomic_store_n(gate, step, __ATOMIC_RELEASE);
    syscall(SYS_futex, gate, FUTEX_WAKE, 0x7FFFFFFF, nullptr, nullptr, 0);
  }
};

bool alive(const Ranks &ranks, int64_t rank) {
  if (ranks.descriptors[rank] >= 0) {
    pollfd poll_of = {ranks.descriptors[rank], POLLIN, 0};
    if (poll(&poll_of, 1, 0) >= 0 && !(poll_of.revents & POLLNVAL)) return !(poll_of.revents & POLLIN);
  }
  char path[40], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", int(ranks.pids[rank]));
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  text[length > 0 ? length : 0] = 0;
  const char *state = strrchr(text, ')');  // "pid (name) state"
  return state && state[1] && state[2] != 'Z' && state[2] != 'X';
}

// Looks again for a while; whether all the others have published `step`.
bool look(const Lines &lines, uint64_t step) {
  const int64_t start = now();
  for (int64_t at = 0;;) {
    for (int i = 0; i < 64; i++) {
      if ((at = lines.missing(step, at)) == lines.ranks.size) return true;
      pause();
    }
    const int64_t passed = now() - start;
    if (passed > SPIN_NS) return false;
    if (passed > ALONE_NS) sched_yield();  // something else may want this core, perhaps the very rank that is waited for
  }
}

// Whether those that `step` still waits for are there; else says who is not.
bool all_present(const Lines &lines, uint64_t step, bool ask_system) {
  Ranks &ranks = lines.ranks;
  for (int64_t at = 0; (at = lines.missing(step, at)) < ranks.size; at++) {
    const bool left = __atomic_load_n(lines.line(at) + GONE, __ATOMIC_ACQUIRE) != 0;
    if (!left && !(ask_system && !alive(ranks, at))) continue;
    if (lines.reached(at) >= step) continue;  // it has published this step and gone since
    ranks.failure = left ? LEFT : DIED;
    ranks.other = at;
    return false;
  }
  return true;
}

bool wait(const Lines &lines, uint64_t step) {
  Ranks &ranks = lines.ranks;
  if (ranks.spin) {
    if (look(lines, step)) return true;
  } else {
    for (int i = 0; i < YIELDS; i++) {
      sched_yield();
      if (lines.missing(step) == ranks.size) return true;
    }
  }
  uint8_t *mark = lines.sleepers + ranks.rank;
  __atomic_store_n(mark, 1, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the last rank sees this mark, or this rank that one's number
  bool present = true;
  while (lines.missing(step) < ranks.size) {
    const uint64_t gate = __atomic_load_n(lines.gate, __ATOMIC_ACQUIRE);
    if (gate >= step) break;
    // the low half of the gate's number is the word slept on: little-endian
    const long slept = syscall(SYS_futex, lines.gate, FUTEX_WAIT, uint32_t(gate), &NAP, nullptr, 0);
    if (!(present = all_present(lines, step, slept < 0 && errno == ETIMEDOUT))) break;
  }
  __atomic_store_n(mark, 0, __ATOMIC_RELAXED);
  return present;
}

}  // namespace

bool meet(Ranks &ranks, uint64_t signature) {
  if (ranks.failure) return false;  // it has left, or somebody has
  const Lines lines{ranks};
  const uint64_t step = ++ranks.step;
  const int64_t kept = SIGNATURE + int64_t(step & 1);
  __atomic_store_n(lines.line(ranks.rank) + kept, signature, __ATOMIC_RELAXED);
  __atomic_store_n(lines.line(ranks.rank) + SEQUENCE, step, __ATOMIC_RELEASE);
  // or two ranks could each miss the other's number, and neither open the gate
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (lines.missing(step) == ranks.size)
    lines.wake_sleepers(step);
  else if (!wait(lines, step))
    return false;
  for (int64_t r = 0; r < ranks.size; r++) {
    const uint64_t theirs = __atomic_load_n(lines.line(r) + kept, __ATOMIC_RELAXED);
    if (theirs == signature) continue;
    ranks.failure = DISAGREES;
    ranks.other = r;
    ranks.mine = signature;
    ranks.theirs = theirs;
    return false;
  }
  return true;
}

}  // namespace oddrank

#else

namespace oddrank {
bool meet(Ranks &ranks, uint64_t) {
  ranks.failure = CLOSED;  // Python offers no group of this kind here
  return false;
}
}  // namespace oddrank

#endif
