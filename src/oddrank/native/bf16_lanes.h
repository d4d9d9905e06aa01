// The products of bf16 weights (bf16_pairs.h) with many x: a lane of a vector is one x, so nothing is added up across a
// vector in the end, and a weight is read once for 32 x. x is turned to that form a tile of columns at a time, by whoever
// takes some rows. Sums are in another order than with few x. e4m3 gains nothing: it would be decoded once for 32 x.
#pragma once
#include "bf16_pairs.h"

namespace oddrank {
namespace {

constexpr int64_t LANES_FROM = 10;      // x: with fewer the empty lanes cost more than the sums across vectors
constexpr int LANE_X = 16, LANES_V = 2;  // x in a vector, and vectors at once
constexpr int LANES_R = 12;             // rows at once: 24 sums
constexpr int LANES_ROWS = 96;          // rows that take a tile of x
constexpr int64_t LANES_TILE = 2048;    // columns: the x of a tile are 128 KB, a part of the second cache

// Sixteen dwords of sixteen x -> sixteen vectors of one dword each, `step` vectors apart.
inline void lanes_turn(const __m512i (&x)[16], __m512i *out, int step) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  for (int j = 0; j < 4; j++) {
    const __m512i even0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i even1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    _mm512_store_si512(out + j * step, _mm512_shuffle_i32x4(even0, even1, 0x88));
    _mm512_store_si512(out + (4 + j) * step, _mm512_shuffle_i32x4(odd0, odd1, 0x88));
    _mm512_store_si512(out + (8 + j) * step, _mm512_shuffle_i32x4(even0, even1, 0xdd));
    _mm512_store_si512(out + (12 + j) * step, _mm512_shuffle_i32x4(odd0, odd1, 0xdd));
  }
}

// Pairs [begin, begin + count) of up to 16 * V arranged x: out[pair][V], lanes without an x are zero. count: of 16.
template <int V>
void lanes_pack(const uint8_t *const *x, int64_t m, int64_t begin, int64_t count, __m512i *out) {
  for (int v = 0; v < V; v++, x += LANE_X, m -= LANE_X)
    for (int64_t p = 0; p < count; p += 16) {
      __m512i rows[16];
      for (int b = 0; b < LANE_X; b++)
        rows[b] = b < m ? _mm512_load_si512(x[b] + (begin + p) * 4) : _mm512_setzero_si512();
      lanes_turn(rows, out + p * V + v, V);
    }
}

inline INLINE __m512i pair_of(const uint8_t *p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}

// Adds the products of `count` pairs of R rows, `stride` bytes apart, to their sums; fetches the R rows after them.
template <int R, int V>
inline INLINE void lanes_pairs(const uint8_t *rows, int64_t stride, const __m512i *x, int64_t count, __m512 (&sums)[R][V]) {
  constexpr int FROM = (R + 2) / 3;  // pointers; the rest are one and two strides from them: there are registers for these
  const uint8_t *at[FROM];
  for (int i = 0; i < FROM; i++) at[i] = rows + 3 * i * stride;
  const auto one = [&](int64_t p) INLINE {
    __m512bh v[V];
#pragma GCC unroll 2
    for (int i = 0; i < V; i++) v[i] = as_pairs(_mm512_load_si512(x + p * V + i));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const __m512bh w = as_pairs(pair_of(at[r / 3] + r % 3 * stride + p * 4));
#pragma GCC unroll 2
      for (int i = 0; i < V; i++) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], w, v[i]);
    }
  };
  int64_t p = 0;
  for (; p + 16 <= count; p += 16) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)  // to the second cache: x goes through the first one before these are read
      _mm_prefetch(reinterpret_cast<const char *>(at[r / 3] + r % 3 * stride + p * 4 + R * stride), _MM_HINT_T1);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i++) one(p + i);
  }
  for (; p < count; p++) one(p);
}

// Adds the products of columns [begin, end) of R rows, times the matrix's factor, to `all`.
template <int R, int V>
inline INLINE void lanes_product(const Matrix &a, int64_t row, int64_t begin, int64_t end, const __m512i *x,
                                 __m512 (*all)[V]) {
  const uint8_t *rows = a.values + row * a.row_bytes + 2 * begin;
  __m512 sums[R][V] = {};
  const int64_t pairs = (end - begin) / 2;
  lanes_pairs<R, V>(rows, a.row_bytes, x, pairs, sums);
  if ((end - begin) % 2)
    for (int r = 0; r < R; r++) {
      uint16_t last;
      std::memcpy(&last, rows + r * a.row_bytes + 4 * pairs, 2);
      for (int v = 0; v < V; v++)
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], as_pairs(_mm512_set1_epi32(last)),
                                      as_pairs(_mm512_load_si512(x + pairs * V + v)));
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) all[r][v] = _mm512_fmadd_ps(sums[r][v], _mm512_set1_ps(a.factor), all[r][v]);
}

// y of rows [begin, end), at most LANES_ROWS, for up to 16 * V x.
template <int V>
void lanes_rows(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                int64_t stride) {
  alignas(64) __m512i packed[LANES_TILE / 2 * V];
  __m512 all[LANES_ROWS][V];
  const int64_t rows = end - begin;
  for (int64_t r = 0; r < (rows + 3) / 4 * 4; r++)
    for (int v = 0; v < V; v++) all[r][v] = _mm512_setzero_ps();
  for (int64_t t = 0; t < a.k; t += LANES_TILE) {
    const int64_t stop = t + LANES_TILE < a.k ? t + LANES_TILE : a.k;
    lanes_pack<V>(x, m, t / 2, (stop - t + PAIRS_GROUP - 1) / PAIRS_GROUP * PAIRS_GROUP / 2, packed);
    int64_t r = 0;
    for (; r + LANES_R <= rows; r += LANES_R) lanes_product<LANES_R, V>(a, begin + r, t, stop, packed, all + r);
    for (; r + 4 <= rows; r += 4) lanes_product<4, V>(a, begin + r, t, stop, packed, all + r);
    for (; r < rows; r++) lanes_product<1, V>(a, begin + r, t, stop, packed, all + r);
  }
  for (int64_t r = 0; r < rows; r += 4)  // four rows are turned back to x at a time
    for (int v = 0; v < V; v++) {
      const __m512 a0 = _mm512_unpacklo_ps(all[r][v], all[r + 1][v]), a1 = _mm512_unpackhi_ps(all[r][v], all[r + 1][v]);
      const __m512 a2 = _mm512_unpacklo_ps(all[r + 2][v], all[r + 3][v]);
      const __m512 a3 = _mm512_unpackhi_ps(all[r + 2][v], all[r + 3][v]);
      const __m512d low[2] = {_mm512_castps_pd(a0), _mm512_castps_pd(a1)};
      const __m512d high[2] = {_mm512_castps_pd(a2), _mm512_castps_pd(a3)};
      alignas(64) float turned[4][4][4];  // [place in four][which four][row]
      for (int j = 0; j < 2; j++) {
        _mm512_store_pd(turned[2 * j], _mm512_unpacklo_pd(low[j], high[j]));
        _mm512_store_pd(turned[2 * j + 1], _mm512_unpackhi_pd(low[j], high[j]));
      }
      const int64_t some = rows - r < 4 ? rows - r : 4, count = m - v * LANE_X < LANE_X ? m - v * LANE_X : LANE_X;
      for (int64_t b = 0; b < count; b++)
        std::memcpy(y + (v * LANE_X + b) * stride + r, turned[b % 4][b / 4], some == 4 ? 16 : size_t(some) * 4);
    }
}

void lanes_multiply(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                    int64_t stride) {
  for (int64_t b = 0; b < m; b += LANE_X * LANES_V)
    for (int64_t row = begin; row < end; row += LANES_ROWS) {
      const int64_t stop = row + LANES_ROWS < end ? row + LANES_ROWS : end;
      float *to = y + b * stride + row - begin;
      m - b > LANE_X ? lanes_rows<LANES_V>(a, x + b, m - b, row, stop, to, stride)
                     : lanes_rows<1>(a, x + b, m - b, row, stop, to, stride);
    }
}

}  // namespace
}  // namespace oddrank
