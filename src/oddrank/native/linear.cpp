// Products of a batch with several stored matrices of the same input, stacked: one call, one sharing of work.
#include <algorithm>
#include <vector>

#include "abi.h"
#include "gemm_abi.h"
#include "order.h"
#include "pool.h"
#include "scratch.h"

namespace oddrank {
namespace {

// y: [m, the sum of the parts' rows], rows y_stride numbers apart; x: [m, k], rows x_stride apart; bias: as long as a row
// of y, or null. Parts have k columns each and may be of different formats.
struct LinearArguments {
  const Matrix *parts;
  int64_t count;
  const float *x;
  int64_t m, x_stride;
  const float *bias;
  float *y;
  int64_t y_stride;
  int32_t threads;
};

constexpr int64_t PIECE = 48 << 10;  // bytes of weights in a piece of work: microseconds, many pieces a matrix
constexpr int64_t BATCH_ROWS = 96;   // the least rows of one where there are several x: those that share a tile of them

struct Part {
  const uint8_t *const *x;  // m arranged ones
  int64_t step;             // rows of a piece
  int64_t first;            // its first piece's number
  int64_t row;              // its first row in y
};

thread_local Scratch arranged_x;
thread_local std::vector<Part> parts_memory;
thread_local std::vector<const uint8_t *> x_memory;

// A multiple of four, at least as many pieces as threads where there are rows enough.
int64_t rows_of_piece(const Matrix &a, int64_t m, int threads) {
  const int64_t shared = m < 2 ? 1 : BATCH_ROWS;
  const int64_t by_size = std::max<int64_t>(PIECE / std::max<int64_t>(a.row_bytes, 1), shared);
  const int64_t by_threads = (a.n + threads - 1) / threads;
  return std::max<int64_t>(4, (std::min(by_size, by_threads) + 3) / 4 * 4);
}

struct Product {
  const Level *level;
  const LinearArguments *a;
  const Part *parts;

  static void piece(void *context, int64_t i) {
    const Product &p = *static_cast<Product *>(context);
    const LinearArguments &a = *p.a;
    int64_t n = a.count - 1;
    while (p.parts[n].first > i) n--;
    const Part &part = p.parts[n];
    const Matrix &matrix = a.parts[n];
    const int64_t begin = (i - part.first) * part.step, end = std::min(matrix.n, begin + part.step);
    const int64_t row = part.row + begin, rows = end - begin;
    p.level->multiply(matrix, part.x, a.m, begin, end, a.y + row, a.y_stride);
    if (a.bias)
      for (int64_t b = 0; b < a.m; b++)
        for (int64_t r = row; r < row + rows; r++) a.y[b * a.y_stride + r] += a.bias[r];
  }
};

thread_local Scratch ordered_x;

struct Arranging {
  const Level *level;
  const LinearArguments *a;
  const Matrix *matrix;
  uint8_t *out;
  int64_t each;

  static void piece(void *context, int64_t b) {
    const Arranging &p = *static_cast<Arranging *>(context);
    const Matrix &m = *p.matrix;
    const float *x = p.a->x + b * p.a->x_stride;
    if (m.order) x = in_order(m, x, ordered_x.floats(m.k));
    p.level->arrange(m, x, 1, p.a->x_stride, p.out + b * p.each);
  }
};

// Whether there is a part whose rows are better decoded once for many x than multiplied by a few x at a time.
bool decoded(const Level *level, const LinearArguments &a) {
  return std::any_of(a.parts, a.parts + a.count, [&](const Matrix &m) { return a.m >= level->gemm_from(m); });
}

}  // namespace
}  // namespace oddrank

using namespace oddrank;

extern "C" void oddrank_linear(const LinearArguments *a) {
  if (!a->m || !a->count) return;
  const Level *level = level_in_use();
  if (decoded(level, *a)) {
    gemm_linear(level, a->parts, a->count, a->x, a->m, a->x_stride, a->bias, a->y, a->y_stride, a->threads);
    return;
  }
  std::vector<Part> &parts = parts_memory;
  parts.resize(size_t(a->count));
  int64_t bytes = 0, pieces = 0, rows = 0;
  const auto first_like = [&](int64_t i) {
    int64_t j = 0;
    while (!alike(a->parts[j], a->parts[i])) j++;
    return j;
  };
  for (int64_t i = 0; i < a->count; i++) {
    const Matrix &m = a->parts[i];
    const int64_t step = rows_of_piece(m, a->m, a->threads);
    parts[size_t(i)] = {nullptr, step, pieces, rows};
    pieces += (m.n + step - 1) / step;
    rows += m.n;
    if (first_like(i) == i) bytes += a->m * level->arranged(m);
  }
  uint8_t *to = reinterpret_cast<uint8_t *>(arranged_x.floats(bytes / 4));
  std::vector<const uint8_t *> &xs = x_memory;
  xs.resize(size_t(a->count * a->m));
  for (int64_t i = 0; i < a->count; i++) {
    const int64_t like = first_like(i);
    parts[size_t(i)].x = xs.data() + like * a->m;
    if (like < i) continue;
    const int64_t each = level->arranged(a->parts[i]);
    Arranging arranging = {level, a, &a->parts[i], to, each};
    share(a->m >= GEMM_FROM ? a->threads : 1, a->m, Arranging::piece, &arranging);
    for (int64_t b = 0; b < a->m; b++, to += each) xs[size_t(i * a->m + b)] = to;
  }
  Product p = {level, a, parts.data()};
  share(a->threads, pieces, Product::piece, &p);
}
