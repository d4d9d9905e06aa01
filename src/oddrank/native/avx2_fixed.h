// Products by 16-bit integers in AVX2, see fixed_x.h.
//
// 64 bytes are GROUP columns, eight blocks of 16: a block's first four bytes go to a 32-bit lane, its last four to the
// same lane of another vector. One look-up makes signed bytes of the low nibbles, one of the high; words that have one of
// them on top (256 times the number) are multiplied by x's words. A lane's sum is then of one block, so scales need no
// more than to be put in the lanes' order, which is blocks 0 1 4 5 2 3 6 7. Codes of int4 need no look-up and are words as
// they are; a lane's zero point is multiplied by the lane's sum of x. Of int8 128 bytes are a group, whose lanes are of the
// same columns.
#pragma once
#include "fixed_x.h"

namespace oddrank {
namespace {

// A scale for each block.
inline __m256 fixed_scales(FixedNvfp4, const uint8_t *p) {
  int64_t eight;
  __builtin_memcpy(&eight, p, 8);
  const __m256i spread = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 4, -1, -1, -1, 5,  //
                                          -1, -1, -1, 2, -1, -1, -1, 3, -1, -1, -1, 6, -1, -1, -1, 7);
  const __m256i top = _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), spread);
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32(top, 4), _mm256_set1_epi32(int(0x87f00000))));
}

// An exponent for two blocks each.
inline __m256 fixed_scales(FixedMxfp4, const uint8_t *p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m256i spread = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 2,  //
                                          -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 3, -1, -1, -1, 3);
  const __m256i top = _mm256_shuffle_epi8(_mm256_set1_epi32(four), spread);
  // code 0 is 2^-127
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_srli_epi32(top, 1), _mm256_set1_epi32(0x00400000)));
}

// The words of a group's scales in the lanes' order. EACH: words of a scale, of which `which`.
template <int COLUMNS, int EACH = 1>
inline __m256i group_words(const uint8_t *p, int which = 0) {
  int32_t words[4 * EACH];
  __builtin_memcpy(words, p, 4 * EACH * 128 / COLUMNS);
  const auto at = [&](int i) { return words[EACH * i + which]; };
  if constexpr (COLUMNS == 128) return _mm256_set1_epi32(at(0));
  if constexpr (COLUMNS == 64) return _mm256_setr_epi32(at(0), at(0), at(1), at(1), at(0), at(0), at(1), at(1));
  if constexpr (COLUMNS == 32) return _mm256_setr_epi32(at(0), at(0), at(2), at(2), at(1), at(1), at(3), at(3));
}

template <int COLUMNS>
inline __m256 fixed_scales(FixedInt4<COLUMNS>, const uint8_t *p) {
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_set1_epi32(255), group_words<COLUMNS>(p)));
}

// Each lane's zero point, and 256 times it.
template <int COLUMNS>
inline __m256i fixed_zeros(FixedInt4<COLUMNS>, const uint8_t *p) {
  const __m256i both =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, -1, 0, 4, -1, -1, 4, 8, -1, -1, 8, 12, -1, -1, 12));
  return _mm256_shuffle_epi8(group_words<COLUMNS>(p), both);
}

template <int COLUMNS, bool ZEROS>
inline __m256 fixed_scales(FixedInt8<COLUMNS, ZEROS>, const uint8_t *p) {
  return _mm256_castsi256_ps(group_words<COLUMNS, ZEROS ? 2 : 1>(p));
}

template <int COLUMNS>
inline __m256i fixed_zeros(FixedInt8<COLUMNS, true>, const uint8_t *p) {
  return group_words<COLUMNS, 2>(p, 1);
}

template <int BITS>
inline void fixed_sums(uint8_t *out) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i total = _mm256_setzero_si256();
  for (int c = 0; c < 8; c++)
    total = _mm256_sub_epi32(
        total, _mm256_madd_epi16(_mm256_load_si256(reinterpret_cast<const __m256i *>(out + 32 * c)), ones));
  const __m256i low = _mm256_and_si256(total, _mm256_set1_epi32((1 << BITS) - 1));
  const __m256i high = _mm256_slli_epi32(_mm256_srai_epi32(total, BITS), 16);
  _mm256_store_si256(reinterpret_cast<__m256i *>(out + 256), _mm256_or_si256(low, high));
}

inline void fixed_words(const float *x, float inverse, uint8_t *out) {
  const __m256 by = _mm256_set1_ps(inverse);
  const __m256i pairs = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  static constexpr int LANE[8] = {0, 1, 4, 5, 2, 3, 6, 7};  // of a block; its own inverse
  __m128 rows[2][8];  // of either half of a block, pairs of columns c, 4 + c for c < 4
  for (int block = 0; block < 8; block++) {
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * block), by));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * block + 8), by));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m256i paired = _mm256_shuffle_epi8(words, pairs);
    rows[0][LANE[block]] = _mm_castsi128_ps(_mm256_castsi256_si128(paired));
    rows[1][LANE[block]] = _mm_castsi128_ps(_mm256_extracti128_si256(paired, 1));
  }
  for (int half = 0; half < 2; half++)
    for (int upper = 0; upper < 2; upper++) {
      __m128 *r = rows[half] + 4 * upper;
      _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
      for (int c = 0; c < 4; c++) _mm_store_ps(reinterpret_cast<float *>(out + 128 * half + 32 * c + 16 * upper), r[c]);
    }
}

// Four nibbles of each word -> words of one code each.
template <int COLUMNS>
inline INLINE void fixed_nibbles(FixedInt4<COLUMNS>, __m256i v, __m256i (&w)[4]) {
  const __m256i nibble = _mm256_set1_epi16(15);
  w[0] = _mm256_and_si256(v, nibble);
  w[1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
  w[2] = _mm256_and_si256(_mm256_srli_epi16(v, 8), nibble);
  w[3] = _mm256_srli_epi16(v, 12);
}

// The same -> 512 times the number of each.
template <class S>
inline INLINE void fixed_nibbles(S, __m256i v, __m256i (&w)[4]) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  const __m256i nibble = _mm256_set1_epi8(0x0f), upper = _mm256_set1_epi16(short(0xff00));
  const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(v, nibble));
  const __m256i odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
  w[0] = _mm256_slli_epi16(even, 8);
  w[1] = _mm256_slli_epi16(odd, 8);
  w[2] = _mm256_and_si256(even, upper);
  w[3] = _mm256_and_si256(odd, upper);
}

// A group's weights: those of the first eight columns of each block, and those of the last.
template <class S>
inline INLINE void fixed_weights(S, const uint8_t *p, __m256i (&first)[4], __m256i (&second)[4]) {
  const __m256 a = _mm256_loadu_ps(reinterpret_cast<const float *>(p));
  const __m256 b = _mm256_loadu_ps(reinterpret_cast<const float *>(p + 32));
  fixed_nibbles(S(), _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), first);
  fixed_nibbles(S(), _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), second);
}

// Bytes c, c + 1, c + 4, c + 5 of eight -> words of c and c + 4, and of c + 1 and c + 5.
inline INLINE void fixed_bytes(__m256i v, __m256i (&w)[4], int at) {
  w[at] = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
  w[at + 1] = _mm256_srai_epi16(v, 8);
}

template <int COLUMNS, bool ZEROS>
inline INLINE void fixed_weights(FixedInt8<COLUMNS, ZEROS>, const uint8_t *p, __m256i (&first)[4], __m256i (&second)[4]) {
  // of each block's words 0 2, 1 3, 4 6, 5 7
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  const auto blocks = [&](int low) INLINE {
    const __m128i *at = reinterpret_cast<const __m128i *>(p) + low;
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(at)), _mm_loadu_si128(at + 2), 1);
    return _mm256_shuffle_epi8(both, order);
  };
  const __m256i a = blocks(0), b = blocks(1), c = blocks(4), d = blocks(5);
  const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
  fixed_bytes(_mm256_unpacklo_epi64(ab, cd), first, 0);
  fixed_bytes(_mm256_unpackhi_epi64(ab, cd), first, 2);
  const __m256i above = _mm256_unpackhi_epi32(a, b), beside = _mm256_unpackhi_epi32(c, d);
  fixed_bytes(_mm256_unpacklo_epi64(above, beside), second, 0);
  fixed_bytes(_mm256_unpackhi_epi64(above, beside), second, 2);
}

inline INLINE __m256i fixed_sum(const __m256i (&w)[4], const uint8_t *x) {
  const __m256i *at = reinterpret_cast<const __m256i *>(x);
  return _mm256_add_epi32(_mm256_add_epi32(_mm256_madd_epi16(w[0], at[0]), _mm256_madd_epi16(w[1], at[1])),
                          _mm256_add_epi32(_mm256_madd_epi16(w[2], at[2]), _mm256_madd_epi16(w[3], at[3])));
}

// Adds the products of GROUP columns with N x to their sums.
template <class S, int N>
inline INLINE void fixed_group(const uint8_t *p, const uint8_t *s, const uint8_t *const (&x)[N], int64_t words,
                               int64_t scales, Vec (&sums)[N]) {
  __m256i first[4], second[4];
  fixed_weights(S(), p, first, second);
  const __m256 scale = fixed_scales(S(), s);
  __m256i zeros = _mm256_setzero_si256();
  if constexpr (S::ZEROS) zeros = fixed_zeros(S(), s);
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const uint8_t *at = x[i] + words;
    __m256i total = _mm256_add_epi32(fixed_sum(first, at), fixed_sum(second, at + 128));
    if constexpr (S::ZEROS)
      total = _mm256_add_epi32(
          total, _mm256_madd_epi16(zeros, _mm256_load_si256(reinterpret_cast<const __m256i *>(at + 256))));
    Vec product = _mm256_cvtepi32_ps(total);
    if constexpr (S::EARLY) product = mul(product, _mm256_broadcast_ss(reinterpret_cast<const float *>(x[i] + scales)));
    sums[i] = fma(product, scale, sums[i]);
  }
}

}  // namespace
}  // namespace oddrank

#include "fixed.h"
