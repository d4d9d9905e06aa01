// Threads that share a piece of work with the one that has it.
#pragma once
#include <cstdint>

namespace oddrank {

// Calls work(context, i) for every i < pieces, on the calling thread and up to threads - 1 others, and returns when all
// are done; pieces near each other mostly on the same thread. The others run where the system lets the process that starts
// them. Where the others are busy with another caller's work the calling thread does it alone.
void share(int threads, int64_t pieces, void (*work)(void *, int64_t), void *context);

}  // namespace oddrank
