// The products of bf16_pairs.h with many x: a lane of a vector is one x, so nothing is added up across a vector in the end,
// and a weight is read once for 32 x. x is turned to that form a tile of columns at a time, by whoever takes some rows.
// Sums are in another order than with few x.
#pragma once
#include "bf16_pairs.h"

namespace oddrank {
namespace {

constexpr int64_t LANES_FROM = 12;      // x: with fewer the empty lanes cost more than the sums across vectors
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
    for (int r = 0; r < R; r++) fetch(at[r / 3] + r % 3 * stride + p * 4 + R * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i++) one(p + i);
  }
  for (; p < count; p++) one(p);
}

// Columns of a tile as pairs, as the rows are read there.
struct LanesBf16 {
  const Matrix &a;
  explicit LanesBf16(const Matrix &matrix) : a(matrix) {}
  int64_t segment() const { return LANES_TILE; }
  template <int R, int V, class Take>
  inline INLINE void products(int64_t row, int64_t begin, int64_t end, const __m512i *x, Take take) {
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
    for (int r = 0; r < R; r++) take(r, a.factor, sums[r]);
  }
};

struct LanesE4m3 {
  const Matrix &a;
  const PairsE4m3 decode;
  alignas(64) uint8_t rows[LANES_R][LANES_TILE * 2];
  explicit LanesE4m3(const Matrix &matrix) : a(matrix) {}
  int64_t segment() const { return a.block_k && a.block_k < LANES_TILE ? a.block_k : LANES_TILE; }
  template <int R, int V, class Take>
  inline INLINE void products(int64_t row, int64_t begin, int64_t end, const __m512i *x, Take take) {
    const int64_t groups = (end - begin + PAIRS_GROUP - 1) / PAIRS_GROUP, each = segment() / PAIRS_GROUP;
    for (int r = 0; r < R; r++) {
      const uint8_t *from = a.values + (row + r) * a.row_bytes + begin;
      for (int64_t g = 0; g < groups; g++, from += PAIRS_GROUP) {
        alignas(64) uint8_t last[PAIRS_GROUP] = {};
        const int64_t left = end - begin - g * PAIRS_GROUP;
        if (left < PAIRS_GROUP) std::memcpy(last, from, size_t(left));
        __m512i w[2];
        fetch(from + R * a.row_bytes);
        decode(left < PAIRS_GROUP ? last : from, w);
        _mm512_store_si512(rows[r] + 128 * g, w[0]);
        _mm512_store_si512(rows[r] + 128 * g + 64, w[1]);
      }
    }
    for (int64_t g = 0; g < groups; g += each) {
      const int64_t count = g + each < groups ? each : groups - g;
      __m512 sums[R][V] = {};
      lanes_pairs<R, V>(rows[0] + 128 * g, LANES_TILE * 2, x + 32 * g * V, 32 * count, sums);
      const int64_t s = a.block_k ? (begin + g * PAIRS_GROUP) / a.block_k : 0;
      for (int r = 0; r < R; r++) take(r, a.factor * segment_scales(a, row + r)[s], sums[r]);
    }
  }
};

// y of rows [begin, end), at most LANES_ROWS, for up to 16 * V x.
template <class F, int V>
void lanes_rows(F &f, const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                int64_t stride) {
  alignas(64) __m512i packed[LANES_TILE / 2 * V];
  __m512 all[LANES_ROWS][V];
  const int64_t rows = end - begin, tile = LANES_TILE / f.segment() * f.segment();  // whole segments
  for (int64_t r = 0; r < (rows + 3) / 4 * 4; r++)
    for (int v = 0; v < V; v++) all[r][v] = _mm512_setzero_ps();
  for (int64_t t = 0; t < a.k; t += tile) {
    const int64_t stop = t + tile < a.k ? t + tile : a.k;
    lanes_pack<V>(x, m, t / 2, (stop - t + PAIRS_GROUP - 1) / PAIRS_GROUP * PAIRS_GROUP / 2, packed);
    int64_t r = 0;
    const auto take = [&](int i, float scale, const __m512 (&sums)[V]) INLINE {
      for (int v = 0; v < V; v++) all[r + i][v] = _mm512_fmadd_ps(sums[v], _mm512_set1_ps(scale), all[r + i][v]);
    };
    for (; r + LANES_R <= rows; r += LANES_R) f.template products<LANES_R, V>(begin + r, t, stop, packed, take);
    for (; r + 4 <= rows; r += 4) f.template products<4, V>(begin + r, t, stop, packed, take);
    for (; r < rows; r++) f.template products<1, V>(begin + r, t, stop, packed, take);
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

template <class F>
void lanes_multiply_as(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                       int64_t stride) {
  F f(a);
  for (int64_t b = 0; b < m; b += LANE_X * LANES_V)
    for (int64_t row = begin; row < end; row += LANES_ROWS) {
      const int64_t stop = row + LANES_ROWS < end ? row + LANES_ROWS : end;
      float *to = y + b * stride + row - begin;
      m - b > LANE_X ? lanes_rows<F, LANES_V>(f, a, x + b, m - b, row, stop, to, stride)
                    : lanes_rows<F, 1>(f, a, x + b, m - b, row, stop, to, stride);
    }
}

void lanes_multiply(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                    int64_t stride) {
  a.format == BF16 ? lanes_multiply_as<LanesBf16>(a, x, m, begin, end, y, stride)
                   : lanes_multiply_as<LanesE4m3>(a, x, m, begin, end, y, stride);
}

}  // namespace
}  // namespace oddrank
