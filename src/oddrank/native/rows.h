// Many rows, or heads, shared out among threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "pool.h"

namespace oddrank {
namespace {

constexpr int64_t ALONE = 1 << 15;   // numbers that one thread works through before another would be awake
constexpr int64_t PIECE_ROWS = 1 << 13;  // numbers in a piece of work

// Calls f(begin, end) for rows of `width` numbers until all are done.
template <class F>
void share_rows(int threads, int64_t rows, int64_t width, F f) {
  if (threads <= 1 || rows * width < ALONE) {
    f(int64_t(0), rows);
    return;
  }
  struct Work {
    F *f;
    int64_t rows, step;
    static void piece(void *context, int64_t i) {
      const Work &w = *static_cast<Work *>(context);
      (*w.f)(i * w.step, std::min(w.rows, (i + 1) * w.step));
    }
  } work = {&f, rows, std::max<int64_t>(1, PIECE_ROWS / std::max<int64_t>(1, width))};
  share(threads, (rows + work.step - 1) / work.step, Work::piece, &work);
}

}  // namespace
}  // namespace oddrank
