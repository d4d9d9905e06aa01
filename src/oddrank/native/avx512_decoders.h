// Sixteen lanes: the vectors and the decoders of the levels with AVX-512 F, BW, VL and DQ.
#pragma once
#include <immintrin.h>

#include "abi.h"

namespace oddrank {
namespace {

typedef __m512 Vec;
constexpr int WIDTH = 16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float v) { return _mm512_set1_ps(v); }
inline Vec load(const float *p) { return _mm512_load_ps(p); }
inline void store(float *p, Vec v) { _mm512_store_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline Vec widened(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
constexpr int AHEAD = 2048;
// Inlined by order: GCC takes a function that only prefetches for one without effect, and drops calls of it.
inline __attribute__((always_inline)) void fetch(const uint8_t *p) { _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0); }

struct Nothing {};

struct Bf16 {
  static constexpr int GROUP = 32, BYTES = 64, KIND = 0, SCALES = 1, SCALE_BYTES = 0;
  static constexpr float UNIT = 1, OF_X = 1;
  typedef Nothing Seen;
  static bool bad(Seen) { return false; }
  static int column(int i) { return i < 16 ? 2 * i : 2 * (i - 16) + 1; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &, Take take) {
    const __m512i v = _mm512_loadu_si512(p);
    take(0, _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)));
    take(1, _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000)))));
  }
};

struct Half {
  static constexpr int GROUP = 32, BYTES = 64, KIND = 0, SCALES = 1, SCALE_BYTES = 0;
  static constexpr float UNIT = 1, OF_X = 1;
  typedef Nothing Seen;
  static bool bad(Seen) { return false; }
  static int column(int i) { return i; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &, Take take) {
    for (int j = 0; j < 2; j++) take(j, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p) + j)));
  }
};

// fp16 of 2^-8 times the number: its bits one down from the sign, fp16's exponent being one bit longer. The codes for
// NaN become 480 and are told by `Seen`.
struct E4m3 {
  static constexpr int GROUP = 32, BYTES = 32, KIND = 1, SCALES = 1, SCALE_BYTES = 0;
  static constexpr float UNIT = 256, OF_X = 1;
  struct Seen {
    __m256i most = _mm256_setzero_si256();
  };
  static bool bad(const Seen &s) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(s.most, _mm256_set1_epi8(0x7f))) != 0;
  }
  static int column(int i) { return i; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &seen, Take take) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    seen.most = _mm256_max_epu8(seen.most, _mm256_and_si256(v, _mm256_set1_epi8(0x7f)));
    const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(v), 7);
    const __m512i words = _mm512_and_si512(wide, _mm512_set1_epi16(short(0xbfff)));
    take(0, _mm512_cvtph_ps(_mm512_castsi512_si256(words)));
    take(1, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1)));
  }
};

// 128 numbers, eight blocks of 16: lane i has the eight numbers of half a block, i / 2, one a nibble.
struct E2m1 {
  static constexpr int GROUP = 128, BYTES = 64, KIND = 2, SCALES = 1;
  static int column(int i) { return 8 * (i % 16) + i / 16; }
  template <class Take>
  static inline __attribute__((always_inline)) void values(const uint8_t *p, Take take) {
    const Vec numbers = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                       -3.0f, -4.0f, -6.0f);
    const __m512i v = _mm512_loadu_si512(p);
    take(0, _mm512_permutexvar_ps(v, numbers));  // takes the low four bits of a lane
    take(1, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), numbers));
    take(2, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 8), numbers));
    take(3, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 12), numbers));
    take(4, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 16), numbers));
    take(5, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 20), numbers));
    take(6, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 24), numbers));
    take(7, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 28), numbers));
  }
};

struct Nvfp4 : E2m1 {
  static constexpr int SCALE_BYTES = 8;
  static constexpr float UNIT = 256, OF_X = 1;
  struct Seen {
    __m128i most = _mm_setzero_si128();
  };
  static bool bad(const Seen &s) { return _mm_movemask_epi8(_mm_cmpeq_epi8(s.most, _mm_set1_epi8(0x7f))) != 0; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &, Take take) { values(p, take); }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[1], Seen &seen) {
    const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    seen.most = _mm_max_epu8(seen.most, _mm_and_si128(v, _mm_set1_epi8(0x7f)));
    const __m256i words = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(v, v)), 8), 1);
    scale[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(short(0xbfff)))), factor);
  }
};

// The words of a group's scales in the lanes' order, eight columns a lane. EACH: words of a scale, of which `which`.
template <int COLUMNS, int EACH = 1>
inline __m512i group_words(const uint8_t *p, int which = 0) {
  if constexpr (COLUMNS == 128) {
    int32_t one;
    __builtin_memcpy(&one, p + 4 * which, 4);
    return _mm512_set1_epi32(one);
  } else {
    constexpr int BYTES = 4 * EACH * 128 / COLUMNS;
    const __m128i *at = reinterpret_cast<const __m128i *>(p);
    __m512i words;
    if constexpr (BYTES == 8) words = _mm512_castsi128_si512(_mm_loadl_epi64(at));
    if constexpr (BYTES == 16) words = _mm512_castsi128_si512(_mm_loadu_si128(at));
    if constexpr (BYTES == 32) words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    const __m512i scale = COLUMNS == 64 ? _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
                                        : _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i place = EACH == 1 ? scale : _mm512_add_epi32(_mm512_add_epi32(scale, scale), _mm512_set1_epi32(which));
    return _mm512_permutexvar_epi32(place, words);
  }
}

// 128 integers: lane i has eight, 8 i to 8 i + 7, one a nibble.
template <int COLUMNS>
struct Int4 {
  static constexpr int GROUP = 128, BYTES = 64, KIND = 2, SCALES = 1, SCALE_BYTES = 4 * GROUP / COLUMNS;
  static constexpr float UNIT = 1, OF_X = 1;
  struct Seen {
    Vec zero = _mm512_setzero_ps();
  };
  static bool bad(const Seen &) { return false; }
  static int column(int i) { return 8 * (i % 16) + i / 16; }
  template <class Take>
  static inline __attribute__((always_inline)) void decode(const uint8_t *p, Seen &seen, Take take) {
    const __m512i v = _mm512_loadu_si512(p), nibble = _mm512_set1_epi32(15);
    const Vec zero = seen.zero;
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      const __m512i codes = _mm512_and_si512(_mm512_srli_epi32(v, unsigned(4 * j)), nibble);
      take(j, _mm512_sub_ps(_mm512_cvtepi32_ps(codes), zero));
    }
  }
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[1], Seen &seen) {
    const __m512i words = group_words<COLUMNS>(p);
    scale[0] = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(255), words)), factor);
    seen.zero = _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(255)));
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
  static inline void scales(const uint8_t *p, Vec factor, Vec (&scale)[1], Seen &seen) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    const __m128i v = _mm_cvtsi32_si128(four);
    seen.most = _mm_max_epu8(seen.most, v);
    const __m128i order = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_shuffle_epi8(v, order)), 23);
    bits = _mm512_max_epi32(bits, _mm512_set1_epi32(0x00400000));  // code 0 is 2^-127
    scale[0] = _mm512_mul_ps(_mm512_castsi512_ps(bits), factor);
  }
};

}  // namespace
}  // namespace oddrank
