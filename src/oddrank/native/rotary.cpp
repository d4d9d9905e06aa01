// Query and key heads made ready for attention: rotated, and for decoding normed and put in the cache on the way.
#include <cstdint>
#include <cstring>

#include "operations.h"
#include "rows.h"
#include "scratch.h"

using namespace oddrank;

namespace {
thread_local Scratch head_memory;
}

extern "C" {

// x [rows, heads, at least rotated], turned in place. cos and sin: [positions, rotated], sin's first half negative;
// places[row] is the row of them. Keep native/rotary.py alike.
struct RotaryArguments {
  float *x;
  const float *cos, *sin;
  const int64_t *places;
  int64_t rows, heads, x_row, x_head, rotated;
  int32_t threads;
};

void oddrank_rotary(const RotaryArguments *a) {
  const Operations &level = operations();
  share_rows(a->threads, a->rows, a->heads * a->rotated, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t at = a->places[row] * a->rotated;
      for (int64_t h = 0; h < a->heads; h++)
        level.rotate(a->x + row * a->x_row + h * a->x_head, a->cos + at, a->sin + at, a->rotated / 2);
    }
  });
}

// For each row, a token: its queries are normed (where there is a weight) and rotated in place; its keys are normed,
// rotated and stored in the cache, values stored. The token has position positions[row] of the sequence in slot
// slots[row], or `row` where slots is null, and row places[row] of cos and sin. Keep native/rotary.py alike.
struct HeadsArguments {
  float *q;
  const float *k, *v;
  const float *q_weight, *k_weight;  // null: no norm
  const float *cos, *sin;
  const int64_t *places, *positions, *slots;
  int64_t rows, q_heads, kv_heads;
  int64_t row_stride, q_stride, kv_stride, rotated;
  Pages pages;
  float eps;
  int32_t threads;
};

void oddrank_heads(const HeadsArguments *a) {
  const Operations &level = operations();
  const int64_t dim = a->pages.dim, half = a->rotated / 2;
  share_rows(a->threads, a->rows, (a->q_heads + 2 * a->kv_heads) * dim, [&](int64_t begin, int64_t end) {
    float *head = head_memory.floats(dim);
    for (int64_t row = begin; row < end; row++) {
      const float *cos = a->cos + a->places[row] * a->rotated, *sin = a->sin + a->places[row] * a->rotated;
      const int64_t slot = a->slots ? a->slots[row] : row, position = a->positions[row];
      for (int64_t h = 0; h < a->q_heads; h++) {
        float *q = a->q + row * a->row_stride + h * a->q_stride;
        if (a->q_weight) level.norm(q, nullptr, a->q_weight, q, dim, a->eps);
        level.rotate(q, cos, sin, half);
      }
      for (int64_t h = 0; h < a->kv_heads; h++) {
        const int64_t at = row * a->row_stride + h * a->kv_stride;
        std::memcpy(head, a->k + at, size_t(dim) * 4);
        if (a->k_weight) level.norm(head, nullptr, a->k_weight, head, dim, a->eps);
        level.rotate(head, cos, sin, half);
        level.to_number(head, row_of(a->pages, a->pages.keys, slot, h, position), dim, a->pages.number);
        level.to_number(a->v + at, row_of(a->pages, a->pages.values, slot, h, position), dim, a->pages.number);
      }
    }
  });
}

}  // extern "C"
