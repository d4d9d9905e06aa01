// AVX2, FMA and F16C: eight lanes.
#if defined(__x86_64__)
#include <immintrin.h>

#include "abi.h"

namespace oddrank {
namespace {

typedef __m256 Vec;
constexpr int WIDTH = 8;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float v) { return _mm256_set1_ps(v); }
inline Vec load(const float *p) { return _mm256_load_ps(p); }
inline void store(float *p, Vec v) { _mm256_store_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline Vec widened(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
constexpr int AHEAD = 2048;  // bytes: about what memory takes to answer
// Inlined by order: GCC takes a function that only prefetches for one without effect, and drops calls of it.
inline __attribute__((always_inline)) void fetch(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }

struct Nothing {};

struct Bf16 {
  static constexpr int GROUP = 16, BYTES = 32, KIND = 0, SCALES = 1, SCALE_BYTES = 0;
  static constexpr float UNIT = 1, OF_X = 1;
  typedef Nothing Seen;
  static bool bad(Seen) { return false; }
  static int column(int i) { return i < 8 ? 2 * i : 2 * (i - 8) + 1; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &, Take take) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    take(0, _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)));
    take(1, _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000)))));
  }
};

struct Half {
  static constexpr int GROUP = 16, BYTES = 32, KIND = 0, SCALES = 1, SCALE_BYTES = 0;
  static constexpr float UNIT = 1, OF_X = 1;
  typedef Nothing Seen;
  static bool bad(Seen) { return false; }
  static int column(int i) { return i; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &, Take take) {
    for (int j = 0; j < 2; j++) take(j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p) + j)));
  }
};

// e4m3's bits in the places of bf16's are 2^-120 times the number; subnormals become fp32's, which FMA takes as fast as
// others here. Half of that power is given back through the scales, half through x: no product on the way is subnormal.
// (Through fp16, whose exponent is one bit longer than e4m3's, takes a conversion of two operations.) The codes for NaN
// become 480 and are told by `Seen`.
struct E4m3 {
  static constexpr int GROUP = 32, BYTES = 32, KIND = 1, SCALES = 1, SCALE_BYTES = 0;
  static constexpr float UNIT = 0x1p60f, OF_X = 0x1p60f;
  struct Seen {
    __m256i most = _mm256_setzero_si256();
  };
  static bool bad(const Seen &s) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(s.most, _mm256_set1_epi8(0x7f))) != 0;
  }
  static int column(int i) {
    const int vector = i / 8, lane = i % 8;
    return 16 * (lane / 4) + 8 * (vector / 2) + 2 * (lane % 4) + vector % 2;
  }
  template <class Take>
  static inline __attribute__((always_inline)) void expand(__m256i high, int at, Take take) {
    const __m256i words = _mm256_and_si256(_mm256_srai_epi16(high, 4), _mm256_set1_epi16(short(0x87f0)));
    take(at, _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
    take(at + 1, _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000)))));
  }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &seen, Take take) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), none = _mm256_setzero_si256();
    seen.most = _mm256_max_epu8(seen.most, _mm256_and_si256(v, _mm256_set1_epi8(0x7f)));
    expand(_mm256_unpacklo_epi8(none, v), 0, take);
    expand(_mm256_unpackhi_epi8(none, v), 2, take);
  }
};

// 128 numbers, eight blocks of 16. Two look-ups give the high and the low byte of the number in bf16; interleaved so
// that a lane is of one block, they are the words whose halves are fp32 numbers. Lanes of the first 64 columns are of
// blocks 0 0 1 1 2 2 3 3.
struct E2m1 {
  static constexpr int GROUP = 128, BYTES = 64, KIND = 2, SCALES = 2;
  static int column(int i) {
    const int vector = i / 8, lane = i % 8;
    const int half = vector / 8, nibble = vector / 4 % 2, upper = vector / 2 % 2, odd = vector % 2;
    const int block = 4 * half + lane / 2, byte = 4 * upper + 2 * (lane % 2) + odd;
    return 16 * block + 2 * byte + nibble;
  }
  template <class Take>
  static inline __attribute__((always_inline)) void expand(__m256i low, __m256i high, int at, Take take) {
    const __m256i top = _mm256_set1_epi32(int(0xffff0000));
    const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    take(at, _mm256_castsi256_ps(_mm256_slli_epi32(first, 16)));
    take(at + 1, _mm256_castsi256_ps(_mm256_and_si256(first, top)));
    take(at + 2, _mm256_castsi256_ps(_mm256_slli_epi32(second, 16)));
    take(at + 3, _mm256_castsi256_ps(_mm256_and_si256(second, top)));
  }
  template <class Take>
  static inline __attribute__((always_inline)) void values(const uint8_t *p, Take take) {
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    for (int half = 0; half < 2; half++) {
      __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p) + half);
      v = _mm256_shuffle_epi32(v, 0xd8);  // low dwords of both blocks, then high ones
      const __m256i even = _mm256_and_si256(v, nibble), odd = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
      expand(_mm256_shuffle_epi8(low, even), _mm256_shuffle_epi8(high, even), 8 * half, take);
      expand(_mm256_shuffle_epi8(low, odd), _mm256_shuffle_epi8(high, odd), 8 * half + 4, take);
    }
  }
  // Scales of blocks 0 1 4 5 2 3 6 7 -> those of the lanes of either half.
  static inline void spread(Vec s, Vec (&scale)[2]) {
    scale[0] = _mm256_unpacklo_ps(s, s);
    scale[1] = _mm256_unpackhi_ps(s, s);
  }
};

struct Nvfp4 : E2m1 {
  static constexpr int SCALE_BYTES = 8;
  static constexpr float UNIT = 256, OF_X = 1;
  struct Seen {
    __m128i most = _mm_setzero_si128();
  };
  static bool bad(const Seen &s) {
    return _mm_movemask_epi8(_mm_cmpeq_epi8(s.most, _mm_set1_epi8(0x7f))) != 0;
  }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &, Take take) { values(p, take); }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[2], Seen &seen) {
    const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    seen.most = _mm_max_epu8(seen.most, _mm_and_si128(v, _mm_set1_epi8(0x7f)));
    const __m128i words = _mm_shuffle_epi8(v, _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 2, -1, 3, -1, 6, -1, 7));
    const __m128i half = _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(short(0xbfff)));
    spread(_mm256_mul_ps(_mm256_cvtph_ps(half), factor), scale);
  }
};

// 128 integers, two halves of 64: lane i of a half has eight, 8 i to 8 i + 7, one a nibble.
template <int COLUMNS>
struct Int4 {
  static constexpr int GROUP = 128, BYTES = 64, KIND = 2, SCALES = 2, SCALE_BYTES = 4 * GROUP / COLUMNS;
  static constexpr float UNIT = 1, OF_X = 1;
  struct Seen {
    Vec zero[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  };
  static bool bad(const Seen &) { return false; }
  static int column(int i) { return i / 64 * 64 + i % 8 * 8 + i / 8 % 8; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &seen, Take take) {
    const __m256i nibble = _mm256_set1_epi32(15);
    for (int half = 0; half < 2; half++) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p) + half);
      const Vec zero = seen.zero[half];
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        const __m256i codes = _mm256_and_si256(_mm256_srli_epi32(v, 4 * j), nibble);
        take(8 * half + j, _mm256_sub_ps(_mm256_cvtepi32_ps(codes), zero));
      }
    }
  }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[2], Seen &seen) {
    for (int half = 0; half < 2; half++) {
      int32_t first, second;
      __builtin_memcpy(&first, p + 64 * half / COLUMNS * 4, 4);
      __builtin_memcpy(&second, p + (64 * half + 32) / COLUMNS * 4, 4);
      const __m256i words = _mm256_setr_epi32(first, first, first, first, second, second, second, second);
      scale[half] = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(~255))), factor);
      seen.zero[half] = _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(255)));
    }
  }
};

struct Mxfp4 : E2m1 {
  static constexpr int SCALE_BYTES = 4;
  static constexpr float UNIT = 1, OF_X = 1;
  struct Seen {
    __m128i most = _mm_setzero_si128();
  };
  static bool bad(const Seen &s) { return _mm_movemask_epi8(_mm_cmpeq_epi8(s.most, _mm_set1_epi8(-1))) != 0; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &, Take take) { values(p, take); }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[2], Seen &seen) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    const __m128i v = _mm_cvtsi32_si128(four);
    seen.most = _mm_max_epu8(seen.most, v);
    const __m128i order = _mm_setr_epi8(0, 0, 2, 2, 1, 1, 3, 3, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_shuffle_epi8(v, order)), 23);
    bits = _mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000));  // code 0 is 2^-127
    spread(_mm256_mul_ps(_mm256_castsi256_ps(bits), factor), scale);
  }
};

}  // namespace
}  // namespace oddrank

#include "int8.h"
#include "mxfp8.h"
#include "kernels.h"
#include "gemm.h"

#include "avx2_fixed.h"

namespace oddrank {
namespace {

int64_t arranged_here(const Matrix &a) { return fixed(a) ? fixed_arranged(a) : arranged(a); }

void arrange_here(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out) {
  fixed(a) ? fixed_arrange(a, x, m, stride, out) : arrange(a, x, m, stride, out);
}

void multiply_here(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                   int64_t stride) {
  fixed(a) ? fixed_multiply(a, x, m, begin, end, y, stride) : multiply(a, x, m, begin, end, y, stride);
}

}  // namespace

const Level avx2_level = {"avx2", arranged_here, arrange_here, multiply_here, one_gemm, one_gemm_from};
}  // namespace oddrank
#endif
