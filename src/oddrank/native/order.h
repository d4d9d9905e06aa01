// x in the order of a matrix's columns. Each file that uses it has its own copy.
#pragma once
#include "abi.h"

namespace oddrank {
namespace {

// to: [a.k]; returns it.
inline const float *in_order(const Matrix &a, const float *x, float *to) {
  for (int64_t c = 0; c < a.k; c++) to[c] = x[a.order[c]];
  return to;
}

}  // namespace
}  // namespace oddrank
