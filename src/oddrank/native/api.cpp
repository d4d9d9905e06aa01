// The C interface, for ctypes. Every function may be called from several threads at once.
#include <algorithm>
#include <cstdint>

#include "abi.h"
#include "pool.h"
#include "scratch.h"

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
#endif
  return false;
}

const Level *const levels[] = {
    &scalar_level,
#if defined(__x86_64__)
    &avx2_level,
    &avx512_level,
#endif
};
constexpr int LEVELS = sizeof levels / sizeof levels[0];
const Level *chosen = &scalar_level;

thread_local Scratch arranged_x;

constexpr int64_t PIECE = 48 << 10;  // bytes of weights in a piece of work: tens of microseconds, many pieces a matrix

// Rows of a piece: a multiple of four, at least as many pieces as threads where there are rows enough.
int64_t rows_of_piece(int64_t rows, int64_t row_bytes, int threads) {
  const int64_t by_size = PIECE / std::max<int64_t>(row_bytes, 1), by_threads = (rows + threads - 1) / threads;
  return std::max<int64_t>(4, (std::min(by_size, by_threads) + 3) / 4 * 4);
}

struct Product {
  const Level *level;
  const Matrix *matrix;
  const float *x;
  const float *bias;
  float *y;
  int64_t m, stride, step;

  static void piece(void *context, int64_t i) {
    const Product &p = *static_cast<Product *>(context);
    const int64_t begin = i * p.step, end = std::min(p.matrix->n, begin + p.step);
    p.level->multiply(*p.matrix, p.x, p.m, begin, end, p.y, p.stride);
    if (p.bias)
      for (int64_t b = 0; b < p.m; b++)
        for (int64_t row = begin; row < end; row++) p.y[b * p.stride + row] += p.bias[row];
  }
};

}  // namespace

const Level *level_in_use() { return chosen; }

}  // namespace oddrank

using namespace oddrank;

extern "C" {

// Changes with the interface: the library of another version is not used.
int32_t oddrank_version() { return 1; }

int32_t oddrank_levels() { return LEVELS; }
const char *oddrank_level_name(int32_t i) { return levels[i]->name; }
int32_t oddrank_level_runs(int32_t i) { return runs(levels[i]); }

// All later calls compute with this level. 0 where the CPU cannot.
int32_t oddrank_use(int32_t i) {
  if (i < 0 || i >= LEVELS || !runs(levels[i])) return 0;
  chosen = levels[i];
  return 1;
}

// y[b] = a x[b] + bias; x: [m, k], y: [m, n], rows x_stride and y_stride numbers apart; bias: [n] or null.
void oddrank_linear(const Matrix *a, const float *x, int64_t m, int64_t x_stride, const float *bias, float *y,
                    int64_t y_stride, int32_t threads) {
  if (m == 0 || a->n == 0) return;
  const Level *level = chosen;
  const int64_t width = level->arranged(a->format, a->k);
  float *own = arranged_x.floats(m * width);
  for (int64_t b = 0; b < m; b++) level->arrange(a->format, x + b * x_stride, a->k, own + b * width);
  Product p = {level, a, own, bias, y, m, y_stride, rows_of_piece(a->n, a->row_bytes, threads)};
  share(threads, (a->n + p.step - 1) / p.step, Product::piece, &p);
}

// out: [tokens, hidden] = the sum over each token's k experts, all different, of weights times
// down(silu(gate x) * up x). gate, up, down: one an expert, [width, hidden], [width, hidden], [hidden, width]; where gate
// and up are one matrix up_row is the first of up's rows, else 0.
void oddrank_experts(const Matrix *gate, const Matrix *up, const Matrix *down, int64_t experts, int64_t up_row,
                     int64_t width, int64_t hidden, const float *x, int64_t tokens,
                     const int64_t *ids, const float *weights, int64_t k, float *out, int32_t threads) {
  routed_experts(chosen, gate, up, down, experts, up_row, width, hidden, x, tokens, ids, weights, k, out,
                 threads);
}

}  // extern "C"
