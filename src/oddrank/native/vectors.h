// Vectors of fp32 as wide as the flags of the including file allow. Each level's file (operations_*.cpp) includes it once;
// everything is in an unnamed namespace, for levels are compiled with different flags and must not share instances.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace oddrank {
namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;  // what SSE2 and NEON have
#endif

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));

inline Vec load(const float *p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float *p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec zero() { return Vec{}; }

// The first `count` lanes, zeros behind them.
inline Vec load(const float *p, int64_t count) {
  if (count == WIDTH) return load(p);
  Vec v = zero();
  std::memcpy(&v, p, size_t(count) * 4);
  return v;
}
inline void store(float *p, Vec v, int64_t count) {
  if (count == WIDTH) return store(p, v);
  std::memcpy(p, &v, size_t(count) * 4);
}

#if defined(__AVX2__) || defined(__AVX512F__)
inline void sum_four_of(__m256 a, __m256 b, __m256 c, __m256 d, float *out) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
#endif

#if defined(__AVX512F__)
inline Vec set1(float v) { return _mm512_set1_ps(v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline __m256 halves(__m512 v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float *out) { sum_four_of(halves(a), halves(b), halves(c), halves(d), out); }
inline Vec from_bf16(const uint16_t *p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
inline Vec from_half(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
#elif defined(__AVX2__)
inline Vec set1(float v) { return _mm256_set1_ps(v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float *out) { sum_four_of(a, b, c, d, out); }
inline Vec from_bf16(const uint16_t *p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
inline Vec from_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
#else
inline Vec set1(float v) { return Vec{v, v, v, v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float *out) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}
#endif

inline float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline float bf16_to_float(uint16_t h) { return from_bits(uint32_t(h) << 16); }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = float(mantissa) * 0x1p-24f;
  return sign ? -small : small;
}

#if !defined(__AVX2__) && !defined(__AVX512F__)
inline Vec from_bf16(const uint16_t *p) {
  return Vec{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
inline Vec from_half(const uint16_t *p) {
  return Vec{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
#endif

// To the nearest, ties to even, as torch rounds.
inline uint16_t float_to_bf16(float f) {
  const uint32_t bits = to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t float_to_half(float f) {
  const uint32_t bits = to_bits(f), size = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x47800000) return uint16_t(sign | 0x7c00);  // 65536 and more
  if (size < 0x38800000) {  // below 2^-14, a multiple of 2^-24: adding 0.5 leaves that many in the last bits
    return uint16_t(sign | (to_bits(from_bits(size) + 0.5f) - 0x3f000000));
  }
  const uint32_t rounded = size + 0xfff + (size >> 13 & 1);
  return uint16_t(sign | ((rounded - 0x38000000) >> 13));
}

inline Vec least(Vec a, Vec b) { return b < a ? b : a; }  // a where either is NaN
inline Vec most(Vec a, Vec b) { return b > a ? b : a; }

// e^x within 1.5 ulp; 0 below about -104, infinity above 88.7. x = n ln 2 + r, and e^r by its series: for |r| <= ln 2 / 2
// the next term is below 2^-27.
inline Vec exponential(Vec x) {
  x = most(least(x, set1(89.0f)), set1(-104.0f));
  const Vec magic = set1(0x1.8p23f);  // adding it leaves the nearest whole number in the last bits
  const Vec shifted = fma(x, set1(0x1.715476p+0f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, set1(-0x1.62e4p-1f), x);         // the first bits of ln 2: the product is exact
  r = fma(n, set1(-0x1.7f7d1cp-20f), r);          // the rest
  Vec p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  const Ints whole = Ints(shifted) - 0x4b400000, half = whole >> 1;
  return p * Vec((half + 127) << 23) * Vec((whole - half + 127) << 23);
}

inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exponential(-x)); }

inline float larger(float a, float b) { return b > a ? b : a; }
#if defined(__AVX512F__)
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
#else
inline float largest(Vec v) {
  float half[WIDTH];
  store(half, v);
  for (int n = WIDTH / 2; n; n /= 2)
    for (int i = 0; i < n; i++) half[i] = larger(half[i], half[i + n]);
  return half[0];
}
#endif

// A number that a function is compiled for.
template <int N>
struct Count {
  static constexpr int value = N;
};

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
constexpr int LITTLE = 0;
#else
constexpr int LITTLE = 1;
#endif

// Calls f(i, count) for every vector of n numbers: count is WIDTH, and what is left for the last.
template <class F>
inline void each_vector(int64_t n, F f) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) f(i, int64_t(WIDTH));
  if (i < n) f(i, n - i);
}

}  // namespace
}  // namespace oddrank
