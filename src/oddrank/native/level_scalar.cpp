// Any CPU: plain C++, eight lanes that a compiler may make vectors of.
#include "abi.h"

#include <cmath>
#include <cstring>

namespace oddrank {
namespace {

constexpr int WIDTH = 8;
struct Vec {
  float v[WIDTH];
};

inline Vec set1(float f) {
  Vec r;
  for (auto &e : r.v) e = f;
  return r;
}
inline Vec zero() { return set1(0.0f); }
inline Vec load(const float *p) {
  Vec r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(float *p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
inline Vec add(Vec a, Vec b) {
  for (int i = 0; i < WIDTH; i++) a.v[i] += b.v[i];
  return a;
}
inline Vec mul(Vec a, Vec b) {
  for (int i = 0; i < WIDTH; i++) a.v[i] *= b.v[i];
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < WIDTH; i++) c.v[i] += a.v[i] * b.v[i];
  return c;
}
inline float sum(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline Vec widened(const uint8_t *p) {
  Vec r;
  for (int i = 0; i < WIDTH; i++) r.v[i] = float(int8_t(p[i]));
  return r;
}
constexpr int AHEAD = 0;
inline void fetch(const uint8_t *) {}

inline float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Numbers of sign, exponent and mantissa without infinities; `nan` where all ones are NaN.
inline float small_float(unsigned code, int exponent_bits, int mantissa_bits, int bias, bool nan) {
  const unsigned mantissa = code & ((1u << mantissa_bits) - 1);
  const unsigned exponent = code >> mantissa_bits & ((1u << exponent_bits) - 1);
  const float sign = code >> (mantissa_bits + exponent_bits) & 1 ? -1.0f : 1.0f;
  if (nan && exponent == (1u << exponent_bits) - 1 && mantissa == (1u << mantissa_bits) - 1) return NAN;
  const float lead = exponent ? 1.0f : 0.0f, part = float(mantissa) / float(1u << mantissa_bits);
  return sign * std::ldexp(lead + part, int(exponent ? exponent : 1) - bias);
}

struct Tables {
  float e4m3[256], power[256], e2m1[16];
  Tables() {
    for (unsigned c = 0; c < 256; c++) e4m3[c] = small_float(c, 4, 3, 7, true);
    for (int c = 0; c < 256; c++) power[c] = c == 255 ? NAN : std::ldexp(1.0f, c - 127);
    for (unsigned c = 0; c < 16; c++) e2m1[c] = small_float(c, 2, 1, 1, false);
  }
};
const Tables tables;

inline float half(uint16_t h) {
  const unsigned exponent = h >> 10 & 31, mantissa = h & 1023;
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) return std::ldexp(float(mantissa), -24) * (sign ? -1.0f : 1.0f);
  return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

struct Common {
  static constexpr int GROUP = 32;
  static constexpr float UNIT = 1, OF_X = 1;
  struct Seen {};
  static bool bad(Seen) { return false; }  // every code for NaN is decoded as one
  static int column(int i) { return i; }
};

struct Bf16 : Common {
  static constexpr int BYTES = 64, KIND = 0, SCALES = 1, SCALE_BYTES = 0;
  template <class Take>
  static inline void decode(const uint8_t *p, Seen &, Take take) {
    Vec w[4];
    uint16_t codes[GROUP];
    std::memcpy(codes, p, sizeof codes);
    for (int i = 0; i < GROUP; i++) w[i / WIDTH].v[i % WIDTH] = from_bits(uint32_t(codes[i]) << 16);
    for (int j = 0; j < 4; j++) take(j, w[j]);
  }
};

struct Half : Common {
  static constexpr int BYTES = 64, KIND = 0, SCALES = 1, SCALE_BYTES = 0;
  template <class Take>
  static inline void decode(const uint8_t *p, Seen &, Take take) {
    Vec w[4];
    uint16_t codes[GROUP];
    std::memcpy(codes, p, sizeof codes);
    for (int i = 0; i < GROUP; i++) w[i / WIDTH].v[i % WIDTH] = half(codes[i]);
    for (int j = 0; j < 4; j++) take(j, w[j]);
  }
};

struct E4m3 : Common {
  static constexpr int BYTES = 32, KIND = 1, SCALES = 1, SCALE_BYTES = 0;
  template <class Take>
  static inline void decode(const uint8_t *p, Seen &, Take take) {
    Vec w[4];
    for (int i = 0; i < GROUP; i++) w[i / WIDTH].v[i % WIDTH] = tables.e4m3[p[i]];
    for (int j = 0; j < 4; j++) take(j, w[j]);
  }
};

struct E2m1 : Common {
  static constexpr int BYTES = 16, KIND = 2, SCALES = 4;
  template <class Take>
  static inline void decode(const uint8_t *p, Seen &, Take take) {
    Vec w[4];
    for (int i = 0; i < GROUP; i++) w[i / WIDTH].v[i % WIDTH] = tables.e2m1[i % 2 ? p[i / 2] >> 4 : p[i / 2] & 15];
    for (int j = 0; j < 4; j++) take(j, w[j]);
  }
};

struct Nvfp4 : E2m1 {
  static constexpr int SCALE_BYTES = 2;
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[4], Seen &) {
    for (int i = 0; i < 4; i++) scale[i] = mul(factor, set1(tables.e4m3[p[i / 2]]));
  }
};

template <int COLUMNS>
struct Int4 : Common {
  static constexpr int GROUP = 128, BYTES = 64, KIND = 2, SCALES = GROUP / COLUMNS, SCALE_BYTES = 4 * SCALES;
  struct Seen {
    Vec zero[SCALES];
  };
  static bool bad(const Seen &) { return false; }
  template <class Take>
  static inline void decode(const uint8_t *p, Seen &seen, Take take) {
    for (int j = 0; j < GROUP / WIDTH; j++, p += WIDTH / 2) {
      Vec w;
      for (int i = 0; i < WIDTH; i++)
        w.v[i] = float(i % 2 ? p[i / 2] >> 4 : p[i / 2] & 15) - seen.zero[j * WIDTH / COLUMNS].v[i];
      take(j, w);
    }
  }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[SCALES], Seen &seen) {
    for (int i = 0; i < SCALES; i++) {
      uint32_t word;
      std::memcpy(&word, p + 4 * i, 4);
      scale[i] = mul(factor, set1(from_bits(word & ~255u)));
      seen.zero[i] = set1(float(word & 255));
    }
  }
};

struct Mxfp4 : E2m1 {
  static constexpr int SCALE_BYTES = 1;
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[4], Seen &) {
    for (auto &s : scale) s = mul(factor, set1(tables.power[p[0]]));
  }
};

}  // namespace
}  // namespace oddrank

#include "int8.h"
#include "mxfp8.h"
#include "kernels.h"
#include "gemm.h"

namespace oddrank {
const Level scalar_level = {"scalar", arranged, arrange, multiply, one_gemm, one_gemm_from};
}
