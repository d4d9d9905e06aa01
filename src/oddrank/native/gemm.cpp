// Products of stored matrices with many x: y[b] = a x[b] + bias, see gemm.h.
#include "gemm_abi.h"

#include <algorithm>

#include "order.h"
#include "pool.h"
#include "scratch.h"

namespace oddrank {
namespace {

thread_local Scratch packed_x, own, ordered_x;

struct Packing {
  const Gemm *gemm;
  const Matrix *matrix;
  const float *x;
  int64_t m, stride;
  float *out;

  static void piece(void *context, int64_t i) {
    const Packing &p = *static_cast<Packing *>(context);
    const int64_t panel = p.gemm->panel, begin = i * panel, count = std::min(panel, p.m - begin);
    const float *x[64];
    float *ordered = p.matrix->order ? ordered_x.floats(count * p.matrix->k) : nullptr;
    for (int64_t b = 0; b < count; b++) {
      x[b] = p.x + (begin + b) * p.stride;
      if (ordered) x[b] = in_order(*p.matrix, x[b], ordered + b * p.matrix->k);
    }
    p.gemm->pack(*p.matrix, x, count, p.out + begin * p.gemm->columns(*p.matrix));
  }
};

struct Product {
  const Gemm *gemm;
  const Matrix *matrix;
  const float *x, *bias;
  float *y;
  int64_t m, stride, step;

  static void piece(void *context, int64_t i) {
    const Product &p = *static_cast<Product *>(context);
    const int64_t begin = i * p.step, end = std::min(p.matrix->n, begin + p.step);
    p.gemm->multiply(*p.matrix, p.x, p.m, begin, end, p.bias ? p.bias + begin : nullptr, p.y + begin, p.stride,
                     own.floats(gemm_scratch(p.m, p.gemm->panel)));
  }
};

// Rows of a piece of work: as many as a tile has, or fewer so that every thread has some.
int64_t step_of(int64_t n, int32_t threads) {
  const int64_t each = (n + 2 * threads - 1) / (2 * threads);
  return std::min(GEMM_ROWS, (each + 11) / 12 * 12);
}

}  // namespace

void gemm_linear(const Level *level, const Matrix *parts, int64_t count, const float *x, int64_t m, int64_t x_stride,
                 const float *bias, float *y, int64_t y_stride, int32_t threads) {
  for (int64_t done = 0; done < m; done += GEMM_BATCH) {
    const int64_t some = std::min(GEMM_BATCH, m - done);
    const Matrix *packed = nullptr;
    const Gemm *gemm = nullptr;
    float *numbers = nullptr;
    int64_t row = 0;
    for (const Matrix *a = parts; a < parts + count; row += a->n, a++) {
      if (!a->n) continue;
      const Gemm *wanted = level->gemm(*a);
      if (!packed || gemm != wanted || packed->format != a->format || packed->order != a->order) {
        packed = a, gemm = wanted;
        const int64_t panels = (some + gemm->panel - 1) / gemm->panel;
        numbers = packed_x.floats(panels * gemm->panel * gemm->columns(*a));
        Packing packing = {gemm, a, x + done * x_stride, some, x_stride, numbers};
        share(threads, panels, Packing::piece, &packing);
      }
      Product p = {gemm, a, numbers, bias ? bias + row : nullptr, y + done * y_stride + row, some, y_stride,
                   step_of(a->n, threads)};
      share(threads, (a->n + p.step - 1) / p.step, Product::piece, &p);
    }
  }
}

}  // namespace oddrank
