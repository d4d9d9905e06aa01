// RMS norms of rows, with the residual that is added first.
#include <cstdint>

#include "operations.h"
#include "rows.h"

using namespace oddrank;

extern "C" {

// x [rows, heads, width], rows x_row numbers apart and heads x_head; delta alike or null, added to x where it lies; y, x
// itself or other memory, = x / sqrt(mean(x^2) + eps) * weight. Keep native/norm.py alike.
struct NormArguments {
  float *x;
  const float *delta, *weight;
  float *y;
  int64_t rows, heads, width;
  int64_t x_row, x_head, delta_row, y_row, y_head;
  float eps;
  int32_t threads;
};

void oddrank_norm(const NormArguments *a) {
  const Operations &level = operations();
  share_rows(a->threads, a->rows * a->heads, a->width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / a->heads, head = i % a->heads;
      level.norm(a->x + row * a->x_row + head * a->x_head, a->delta ? a->delta + row * a->delta_row + head * a->x_head : nullptr,
                 a->weight, a->y + row * a->y_row + head * a->y_head, a->width, a->eps);
    }
  });
}

}  // extern "C"
