// Replays remembered calls: see native/tape.py.
#include <time.h>

#include <cstdint>

#include "failed.h"

namespace oddrank {

thread_local bool operation_failed = false;

struct Call {
  void (*function)(const void *);
  const void *arguments;
};

namespace {

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace
}  // namespace oddrank

using namespace oddrank;

// Makes the calls in order, up to one that fails. Returns how many were made, the failed one not counted. Where
// `nanoseconds` is given the time of each is added to it.
extern "C" int64_t oddrank_replay(const Call *calls, int64_t count, int64_t *nanoseconds) {
  operation_failed = false;
  int64_t before = nanoseconds ? now() : 0;
  for (int64_t i = 0; i < count; i++) {
    calls[i].function(calls[i].arguments);
    if (operation_failed) return i;
    if (nanoseconds) {
      const int64_t after = now();
      nanoseconds[i] += after - before;
      before = after;
    }
  }
  return count;
}
