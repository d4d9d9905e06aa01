// Which level's operations are in use: the one that products are computed with (api.cpp).
#include "operations.h"

#include "abi.h"

namespace oddrank {

const Operations &operations() {
#if defined(__x86_64__)
  const Level *level = level_in_use();
  if (level == &avx512_level) return avx512_operations;
  if (level == &avx2_level) return avx2_operations;
#endif
  return scalar_operations;
}

}  // namespace oddrank
