// Products by 16-bit integers in AVX-512 with VNNI, see fixed_x.h.
//
// 64 bytes are GROUP columns, eight blocks of 16: a 32-bit lane has half a block, columns 8 i to 8 i + 7 of lane i. One
// look-up makes signed bytes of the low nibbles, one of the high; words that have one of them on top (256 times the
// number) are multiplied by x's words, four times two to a lane. Codes of int4 need no look-up and are words as they are;
// a lane's zero point is multiplied by the lane's sum of x. Scales are spread over the lanes. Of int8 128 bytes are a
// group, whose lanes are of the same columns.
#pragma once
#include "fixed_x.h"

namespace oddrank {
namespace {

inline __m512 fixed_scales(FixedNvfp4, const uint8_t *p) {
  int64_t eight;
  __builtin_memcpy(&eight, p, 8);
  const __m512i spread = _mm512_set_epi8(7, -1, -1, -1, 7, -1, -1, -1, 6, -1, -1, -1, 6, -1, -1, -1,  //
                                         5, -1, -1, -1, 5, -1, -1, -1, 4, -1, -1, -1, 4, -1, -1, -1,  //
                                         3, -1, -1, -1, 3, -1, -1, -1, 2, -1, -1, -1, 2, -1, -1, -1,  //
                                         1, -1, -1, -1, 1, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1);
  const __m512i top = _mm512_shuffle_epi8(_mm512_set1_epi64(eight), spread);
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32(int(0x87f00000))));
}

inline __m512 fixed_scales(FixedMxfp4, const uint8_t *p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(
      _mm_cvtsi32_si128(four), _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)));
  // code 0 is 2^-127
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(exponents, 23), _mm512_set1_epi32(0x00400000)));
}

template <int COLUMNS>
inline __m512 fixed_scales(FixedInt4<COLUMNS>, const uint8_t *p) {
  return _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(255), group_words<COLUMNS>(p)));
}

// Each lane's zero point, and 256 times it.
template <int COLUMNS>
inline __m512i fixed_zeros(FixedInt4<COLUMNS>, const uint8_t *p) {
  const __m512i both = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, -1, 0, 4, -1, -1, 4, 8, -1, -1, 8, 12, -1, -1, 12));
  return _mm512_shuffle_epi8(group_words<COLUMNS>(p), both);
}

template <int COLUMNS, bool ZEROS>
inline __m512 fixed_scales(FixedInt8<COLUMNS, ZEROS>, const uint8_t *p) {
  return _mm512_castsi512_ps(group_words<COLUMNS, ZEROS ? 2 : 1>(p));
}

template <int COLUMNS>
inline __m512i fixed_zeros(FixedInt8<COLUMNS, true>, const uint8_t *p) {
  return group_words<COLUMNS, 2>(p, 1);
}

template <int BITS>
inline void fixed_sums(uint8_t *out) {
  const __m512i ones = _mm512_set1_epi16(1);
  __m512i total = _mm512_setzero_si512();
  for (int c = 0; c < 4; c++) total = _mm512_sub_epi32(total, _mm512_madd_epi16(_mm512_load_si512(out + 64 * c), ones));
  const __m512i low = _mm512_and_si512(total, _mm512_set1_epi32((1 << BITS) - 1));
  const __m512i high = _mm512_slli_epi32(_mm512_srai_epi32(total, BITS), 16);
  _mm512_store_si512(out + 256, _mm512_or_si512(low, high));
}

inline void fixed_words(const float *x, float inverse, uint8_t *out) {
  const __m512 by = _mm512_set1_ps(inverse);
  // of eight words 0 4, 1 5, 2 6, 3 7
  const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  __m512i rows[4];  // dword c of 128 bits i: columns c, 4 + c of lane 4 row + i
  for (int r = 0; r < 4; r++) {
    const __m256i a = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 32 * r), by)));
    const __m256i b = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 32 * r + 16), by)));
    rows[r] = _mm512_shuffle_epi8(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), pairs);
  }
  const __m512i every = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  for (int c = 0; c < 4; c++) {
    const __m512i at = _mm512_add_epi32(every, _mm512_set1_epi32(c));
    const __m512i low = _mm512_permutex2var_epi32(rows[0], at, rows[1]);
    const __m512i high = _mm512_permutex2var_epi32(rows[2], at, rows[3]);
    _mm512_store_si512(out + 64 * c, _mm512_mask_blend_epi32(0xff00, low, high));
  }
}

// Eight nibbles of each lane -> words of the codes.
template <int COLUMNS>
inline INLINE void fixed_weights(FixedInt4<COLUMNS>, const uint8_t *p, __m512i (&w)[4]) {
  const __m512i v = _mm512_loadu_si512(p), nibble = _mm512_set1_epi16(15);
  w[0] = _mm512_and_si512(v, nibble);
  w[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
  w[2] = _mm512_and_si512(_mm512_srli_epi16(v, 8), nibble);
  w[3] = _mm512_srli_epi16(v, 12);
}

// The same -> words of 512 times the number.
template <class S>
inline INLINE void fixed_weights(S, const uint8_t *p, __m512i (&w)[4]) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  const __m512i nibble = _mm512_set1_epi8(0x0f), upper = _mm512_set1_epi16(short(0xff00));
  const __m512i v = _mm512_loadu_si512(p);
  const __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(v, nibble));
  const __m512i odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
  w[0] = _mm512_slli_epi16(even, 8);
  w[1] = _mm512_slli_epi16(odd, 8);
  w[2] = _mm512_and_si512(even, upper);
  w[3] = _mm512_and_si512(odd, upper);
}

// Eight bytes of each lane -> words, the first and the fifth, the second and the sixth, ...
template <int COLUMNS, bool ZEROS>
inline INLINE void fixed_weights(FixedInt8<COLUMNS, ZEROS>, const uint8_t *p, __m512i (&w)[4]) {
  const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
  const __m512i four = _mm512_setr_epi32(0x020000, 0x060004, 0x0a0008, 0x0e000c, 0x120010, 0x160014, 0x1a0018, 0x1e001c,
                                         0x220020, 0x260024, 0x2a0028, 0x2e002c, 0x320030, 0x360034, 0x3a0038, 0x3e003c);
  const __m512i first = _mm512_permutex2var_epi16(a, four, b);
  const __m512i second = _mm512_permutex2var_epi16(a, _mm512_add_epi16(four, _mm512_set1_epi16(1)), b);
  w[0] = _mm512_srai_epi16(_mm512_slli_epi16(first, 8), 8);
  w[1] = _mm512_srai_epi16(first, 8);
  w[2] = _mm512_srai_epi16(_mm512_slli_epi16(second, 8), 8);
  w[3] = _mm512_srai_epi16(second, 8);
}

// Adds the products of GROUP columns with N x to their sums.
template <class S, int N>
inline INLINE void fixed_group(const uint8_t *p, const uint8_t *s, const uint8_t *const (&x)[N], int64_t words,
                               int64_t scales, Vec (&sums)[N]) {
  __m512i w[4], zeros = _mm512_setzero_si512();
  fixed_weights(S(), p, w);
  const __m512 scale = fixed_scales(S(), s);
  if constexpr (S::ZEROS) zeros = fixed_zeros(S(), s);
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const __m512i *at = reinterpret_cast<const __m512i *>(x[i] + words);
    __m512i total = _mm512_dpwssd_epi32(_mm512_setzero_si512(), w[0], at[0]);
    total = _mm512_dpwssd_epi32(total, w[1], at[1]);
    __m512i other = _mm512_setzero_si512();
    if constexpr (S::ZEROS) other = _mm512_dpwssd_epi32(other, zeros, at[4]);
    other = _mm512_dpwssd_epi32(other, w[2], at[2]);
    other = _mm512_dpwssd_epi32(other, w[3], at[3]);
    Vec product = _mm512_cvtepi32_ps(_mm512_add_epi32(total, other));
    if constexpr (S::EARLY) product = mul(product, _mm512_set1_ps(*reinterpret_cast<const float *>(x[i] + scales)));
    sums[i] = fma(product, scale, sums[i]);
  }
}

}  // namespace
}  // namespace oddrank

#include "fixed.h"
