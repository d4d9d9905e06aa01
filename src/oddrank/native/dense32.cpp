// Products with fp32 matrices.
#include <algorithm>
#include <cstdint>

#include "operations.h"
#include "pool.h"

using namespace oddrank;

extern "C" {

// y[b] = a x[b] + bias; a: [n, k], dense; x: [m, k], y: [m, n], rows x_row and y_row apart; bias: [n] or null. Keep
// native/dense32.py alike.
struct LinearF32Arguments {
  const float *a, *x, *bias;
  float *y;
  int64_t n, k, m, x_row, y_row;
  int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t PIECE = 48 << 10;  // bytes of weights in a piece of work
constexpr int64_t ALONE = 256 << 10;

struct Product {
  const LinearF32Arguments *a;
  const Operations *level;
  int64_t step;

  static void piece(void *context, int64_t i) {
    const Product &p = *static_cast<Product *>(context);
    const LinearF32Arguments &a = *p.a;
    p.level->products(a.a, a.k, a.x, a.m, a.x_row, i * p.step, std::min(a.n, (i + 1) * p.step), a.bias, a.y, a.y_row);
  }
};

}  // namespace

extern "C" {

void oddrank_linear_f32(const LinearF32Arguments *a) {
  const int64_t row_bytes = std::max<int64_t>(4, 4 * a->k);
  Product p = {a, &operations(), std::max<int64_t>(1, PIECE / row_bytes)};
  share(a->n * row_bytes < ALONE ? 1 : a->threads, (a->n + p.step - 1) / p.step, Product::piece, &p);
}

}  // extern "C"
