// The ranks of one machine in the memory that all of them map: runtime/parallel/steps.py and shm.py say what lies where
// and why that is enough. The interpreter's code does the same, step by step, and may take turns with this one.
#pragma once
#include <cstdint>

namespace oddrank {

constexpr int64_t SLOT_HEADER = 128;  // bytes before a slot's data

enum Failure : int64_t { NONE = 0, LEFT = 1, DIED = 2, DISAGREES = 3, CLOSED = 4 };

// One rank's end. Python makes it: keep native/ranks.py alike.
struct Ranks {
  uint8_t *memory;
  int64_t rank, size;
  int64_t slots;       // where the slots begin, from `memory` on: two buffers of `size`
  int64_t slot_bytes;  // of data
  const int32_t *descriptors;  // of each rank's process: pidfd, or -1
  const int32_t *pids;
  uint64_t step;  // the last that this rank published
  int64_t spin;   // whether it has a core of its own, so that it may look again for a while before it sleeps
  // What went wrong, with whom, and the two signatures where they differ.
  int64_t failure, other;
  uint64_t mine, theirs;

  uint8_t *data(int64_t buffer, int64_t of) const {
    return memory + slots + (buffer * size + of) * (SLOT_HEADER + slot_bytes) + SLOT_HEADER;
  }
};

// Publishes the next step, with everything stored before it, and waits until the others have too. What they stored before
// is then visible. False, and ranks.failure, where a rank is gone or said something else.
bool meet(Ranks &ranks, uint64_t signature);

}  // namespace oddrank
