// What is done to every number by itself.
#include <cstdint>
#include <cstring>

#include "operations.h"
#include "rows.h"

using namespace oddrank;

extern "C" {

// y [rows, width] = activation(gate) * up, times sigmoid(scale[row]) unless scale is null; gate and up: rows apart numbers
// apart. Keep native/elementwise.py alike.
struct GatedArguments {
  const float *gate, *up, *scale;
  float *y;
  int64_t rows, width, apart;
  int32_t activation, threads;
};

void oddrank_gated(const GatedArguments *a) {
  const Operations &level = operations();
  // A piece is a part of a row: a single long row is worth several threads, too.
  constexpr int64_t PART = 4096;
  const int64_t parts = (a->width + PART - 1) / PART;
  share_rows(a->threads, a->rows * parts, std::min(a->width, PART), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / parts, at = i % parts * PART, n = std::min(PART, a->width - at);
      float *y = a->y + row * a->width + at;
      level.gated(a->gate + row * a->apart + at, a->up + row * a->apart + at, y, n, a->activation);
      if (a->scale) {
        float factor = 1;
        level.scale_by_sigmoid(&factor, a->scale + row, 1);
        level.scale(y, n, factor);
      }
    }
  });
}

// x [rows, width] += y, or = y where `set`; rows of y y_row apart (0: one row for all); y null: zeros. Keep
// native/elementwise.py alike.
struct AddArguments {
  float *x;
  const float *y;
  int64_t rows, width, y_row;
  int32_t set, threads;
};

void oddrank_add(const AddArguments *a) {
  const Operations &level = operations();
  share_rows(a->threads, a->rows, a->width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      float *x = a->x + row * a->width;
      if (!a->y)
        std::memset(x, 0, size_t(a->width) * 4);
      else if (a->set)
        std::memcpy(x, a->y + row * a->y_row, size_t(a->width) * 4);
      else
        level.add(x, a->y + row * a->y_row, a->width);
    }
  });
}

}  // extern "C"
