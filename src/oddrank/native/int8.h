// 8-bit integers over the vectors of one level, which are defined before; widened(p) makes WIDTH signed bytes numbers.
#pragma once
#include <cstring>

#include "abi.h"

namespace oddrank {
namespace {

// ZEROS: whether zero points follow the scales. Vectors are of the columns in order, so each has one scale.
template <int COLUMNS, bool ZEROS>
struct Int8 {
  static constexpr int GROUP = 128, BYTES = 128, KIND = 2, SCALES = GROUP / COLUMNS;
  static constexpr int EACH = ZEROS ? 8 : 4, SCALE_BYTES = EACH * SCALES;
  static constexpr float UNIT = 1, OF_X = 1;
  struct Seen {
    Vec less[SCALES];  // minus the zero points
  };
  static bool bad(const Seen &) { return false; }
  static int column(int i) { return i; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &seen, Take take) {
#pragma GCC unroll 16
    for (int j = 0; j < GROUP / WIDTH; j++) {
      const Vec codes = widened(p + j * WIDTH);
      take(j, ZEROS ? add(codes, seen.less[j * WIDTH / COLUMNS]) : codes);
    }
  }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[SCALES], Seen &seen) {
    for (int i = 0; i < SCALES; i++, p += EACH) {
      float found;
      std::memcpy(&found, p, 4);
      scale[i] = mul(factor, set1(found));
      if (ZEROS) {
        int16_t zero;
        std::memcpy(&zero, p + 4, 2);
        seen.less[i] = set1(float(-zero));
      }
    }
  }
};

}  // namespace
}  // namespace oddrank
