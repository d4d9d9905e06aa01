// Rows of a table, looked up by tokens.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace oddrank {

// out: [count, width] fp32. table: [rows, width] of `dtype` (0 bf16, 1 fp16, 2 fp32). row: int32 [tokens], where in the table
// each token's row is, -1 for none, which gives zeros, as does a token past the end; null: token t's is row t. Keep
// native/embedding.py alike.
struct TakeRowsArguments {
  const void *table;
  const int64_t *tokens;
  const int32_t *row;
  float *out;
  int64_t count, width, known, dtype;
};

namespace {

template <class N>
void take(const TakeRowsArguments &a) {
  const auto *table = static_cast<const typename N::Stored *>(a.table);
  for (int64_t i = 0; i < a.count; i++) {
    const int64_t token = a.tokens[i];
    const int64_t row = token >= a.known ? -1 : a.row ? a.row[token] : token;
    float *out = a.out + i * a.width;
    if (row < 0) {
      std::fill(out, out + a.width, 0.0f);
      continue;
    }
    const auto *from = table + row * a.width;
    for (int64_t c = 0; c < a.width; c++) out[c] = N::widen(from[c]);
  }
}

}  // namespace
}  // namespace oddrank

extern "C" void oddrank_take_rows(const oddrank::TakeRowsArguments *a) {
  using namespace oddrank;
  switch (a->dtype) {
    case 0: return take<BFloat>(*a);
    case 1: return take<HalfFloat>(*a);
    default: return take<Plain<float>>(*a);
  }
}
