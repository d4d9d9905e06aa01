// The levels, for ctypes: which there are, which this CPU runs, which one computes. The operations themselves are each in a
// file of its own, `void oddrank_NAME(const NAME_arguments *)`; they may be called from several threads at once.
#include <cstdint>

#include "abi.h"

#ifndef ODDRANK_SOURCES
#define ODDRANK_SOURCES ""
#endif

namespace oddrank {
namespace {

bool runs(const Level *level) {
  if (level == &scalar_level) return true;
#if defined(__x86_64__)
  const bool eight = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (level == &avx2_level) return eight;
  if (level == &avx512_level)
    return eight && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (level == &avx512bf16_level)
    return runs(&avx512_level) && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi");
#endif
  return false;
}

const Level *const levels[] = {
    &scalar_level,
#if defined(__x86_64__)
    &avx2_level,
    &avx512_level,
    &avx512bf16_level,
#endif
};
constexpr int LEVELS = sizeof levels / sizeof levels[0];
const Level *chosen = &scalar_level;

}  // namespace

const Level *level_in_use() { return chosen; }

}  // namespace oddrank

using namespace oddrank;

extern "C" {

// The digest of the sources that this was compiled from (setup.py): where the ones beside it have another it is not used.
const char *oddrank_sources() { return ODDRANK_SOURCES; }

int32_t oddrank_levels() { return LEVELS; }
const char *oddrank_level_name(int32_t i) { return levels[i]->name; }
int32_t oddrank_level_runs(int32_t i) { return runs(levels[i]); }

// All later calls compute with this level. 0 where the CPU cannot.
int32_t oddrank_use(int32_t i) {
  if (i < 0 || i >= LEVELS || !runs(levels[i])) return 0;
  chosen = levels[i];
  return 1;
}

}  // extern "C"
