// Types of numbers that ranks add: how each is widened for the sum and rounded back, once. In fp32 for half precision.
// Without branches, so that the compiler makes vectors of it. Each file that uses it has its own copy.
#pragma once
#include <cstdint>
#include <cstring>

namespace oddrank {
namespace {

inline float float_of(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t bits_of(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

template <class T>
struct Plain {
  using Stored = T;
  using Sum = T;
  static T widen(T v) { return v; }
  static T add(T a, T b) { return T(a + b); }
  static T narrow(T v) { return v; }
};

struct Truth {
  using Stored = uint8_t;
  using Sum = uint8_t;
  static uint8_t widen(uint8_t v) { return v; }
  static uint8_t add(uint8_t a, uint8_t b) { return a | b; }
  static uint8_t narrow(uint8_t v) { return v; }
};

struct BFloat {
  using Stored = uint16_t;
  using Sum = float;
  static float widen(uint16_t v) { return float_of(uint32_t(v) << 16); }
  static float add(float a, float b) { return a + b; }
  static uint16_t narrow(float f) {  // to the nearest, ties to even
    const uint32_t bits = bits_of(f);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
  }
};

struct HalfFloat {
  using Stored = uint16_t;
  using Sum = float;
  static float widen(uint16_t v) {
    const uint32_t sign = uint32_t(v & 0x8000) << 16, rest = uint32_t(v & 0x7FFF) << 13;
    const float scaled = float_of(rest) * float_of(0x77800000);  // 2^112: the exponent's other bias, subnormals too
    const uint32_t large = rest >= 0x0F800000 ? 0x7F800000 : 0;  // infinite, or no number
    return float_of(bits_of(scaled) | large | sign);
  }
  static float add(float a, float b) { return a + b; }
  static uint16_t narrow(float f) {
    const uint32_t bits = bits_of(f), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    const uint32_t normal = (rest + 0xC8000000 + 0xFFF + ((rest >> 13) & 1)) >> 13;  // less 112 of the exponent
    const uint32_t tiny = bits_of(float_of(rest) + 0.5f) - 0x3F000000;  // 2^-24 is the last bit of 0.5
    const uint32_t finite = rest < 0x38800000 ? tiny : normal;
    const uint32_t large = rest > 0x7F800000 ? 0x7E00 : 0x7C00;
    return uint16_t((rest >= 0x477FF000 ? large : finite) | sign);
  }
};

}  // namespace
}  // namespace oddrank
