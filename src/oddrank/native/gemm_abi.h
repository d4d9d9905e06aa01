// What gemm.cpp and the levels share of products with many x. Plain data only, as in abi.h.
#pragma once
#include "abi.h"

namespace oddrank {

constexpr int64_t GEMM_FROM = 32;      // x, from which `gemm` is the faster product
constexpr int64_t GEMM_ROWS = 96;      // of a matrix, decoded together at most: a multiple of what a kernel takes at once
constexpr int64_t GEMM_COLUMNS = 384;  // and columns: a multiple of every group
constexpr int64_t GEMM_ROW = GEMM_COLUMNS + 16;  // numbers from a decoded row to the next, apart from powers of two
constexpr int64_t GEMM_BATCH = 512;              // x in one pass over the rows

// Products of many x by one level. x is "packed": panels of `panel` x each, in a panel the numbers of all its x for the
// first column (or pair of columns in bf16) that the level decodes, then for the second, ...; zeros fill the last panel and
// the last group of columns.
struct Gemm {
  int64_t panel;
  // Columns, or pairs, of a packed x: numbers of four bytes.
  int64_t (*columns)(const Matrix &a);
  // Packs `count` x, at most a panel: x[i] is a.k numbers. out: [columns(a), panel]
  void (*pack)(const Matrix &a, const float *const *x, int64_t count, float *out);
  // y[b * stride + row - begin] = row . x[b] (+ bias[row - begin]) for rows [begin, end), at most GEMM_ROWS, and b < m,
  // at most GEMM_BATCH. scratch: 64-byte aligned, gemm_scratch(m, panel) numbers.
  void (*multiply)(const Matrix &a, const float *x, int64_t m, int64_t begin, int64_t end, const float *bias, float *y,
                   int64_t stride, float *scratch);
};

// A decoded tile and the sums of m x.
inline constexpr int64_t gemm_scratch(int64_t m, int64_t panel) {
  return GEMM_ROWS * (GEMM_ROW + (m + panel - 1) / panel * panel);
}

// y[b] = the parts, one above the other, times x[b], plus bias: [the sum of their rows], or null. Parts have as many
// columns; rows of x and of y are x_stride and y_stride numbers apart.
void gemm_linear(const Level *level, const Matrix *parts, int64_t count, const float *x, int64_t m, int64_t x_stride,
                 const float *bias, float *y, int64_t y_stride, int32_t threads);

}  // namespace oddrank
