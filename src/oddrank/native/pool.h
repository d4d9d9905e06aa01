// Threads that share a piece of work with the one that has it.
#pragma once
#include <cstdint>

namespace oddrank {

// Calls work(context, i) for every i < pieces, on the calling thread and up to threads - 1 others, and returns when all
// are done. Where the others are busy with another caller's work the calling thread does it alone.
void share(int threads, int64_t pieces, void (*work)(void *, int64_t), void *context);

// Keeps the threads other than callers on these CPUs, one each in turn; none: wherever the system puts them. For
// threads that start later.
void pin(const int32_t *cpus, int32_t count);

}  // namespace oddrank
