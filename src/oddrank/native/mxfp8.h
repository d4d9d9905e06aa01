// MXFP8 over the vectors and the e4m3 of one level, which are defined before: a power of two for 32 columns each.
#pragma once
#include <cstring>

#include "abi.h"

namespace oddrank {
namespace {

// fp32's bits of each e8m0 code: 2^(code - 127), which is subnormal for 0; 255 is NaN.
struct Powers {
  uint32_t bits[256];
  constexpr Powers() : bits() {
    for (uint32_t code = 0; code < 256; code++) bits[code] = code == 255 ? 0x7fc00000 : code ? code << 23 : 0x00400000;
  }
};
constexpr Powers powers;  // known when compiled: nothing here may run before the CPU is known

inline float power(uint8_t code) {
  float found;
  std::memcpy(&found, &powers.bits[code], 4);
  return found;
}

// The powers reach over all of fp32, so what a level's e4m3 leaves to scales and x is multiplied in at once.
struct Mxfp8 {
  static constexpr int GROUP = 128, BYTES = 128, KIND = 2, SCALES = 4, SCALE_BYTES = 4;
  static constexpr float UNIT = 1, OF_X = 1;
  typedef E4m3::Seen Seen;
  static bool bad(const Seen &s) { return E4m3::bad(s); }
  static int column(int i) { return i / 32 * 32 + E4m3::column(i % 32); }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &seen, Take take) {
    static_assert(E4m3::GROUP == 32, "a scale's columns");
    const Vec whole = set1(E4m3::UNIT * E4m3::OF_X), none = zero();
    for (int part = 0; part < 4; part++, p += 32)
      E4m3::decode(p, seen, [&](int j, Vec w) __attribute__((always_inline)) {
        take(part * (32 / WIDTH) + j, fma(w, whole, none));
      });
  }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[4], Seen &) {
    for (int i = 0; i < 4; i++) scale[i] = mul(factor, set1(power(p[i])));
  }
};

}  // namespace
}  // namespace oddrank
