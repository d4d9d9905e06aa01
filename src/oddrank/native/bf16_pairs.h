// Products of bf16, e4m3 and MXFP8 weights with x in bf16, by pairs: what matrices that are not `exact` take where the CPU has
// them (AVX-512 BF16). Weights are exact in bf16; only x is rounded, to the nearest bf16. Sums are in fp32.
//
// A row is taken in groups of 64 columns, two vectors of pairs. Several x: a tile of their columns at a time, which stays
// in the first cache while the rows of a block take it, some at once; sums are the same for any number of x.
#pragma once
#include "abi.h"

namespace oddrank {
namespace {

constexpr int PAIRS_GROUP = 64;                 // columns
constexpr int PAIRS_TILE = 1024;                // columns of a tile: of eight x half of the first cache
constexpr int PAIRS_ROWS = 96;                  // rows that take a tile before the next one
constexpr int64_t PAIRS_SHARED = 32;            // rows that share scales
static_assert(SEGMENTS == PAIRS_GROUP, "abi.h tells matrices that are taken here from those that are not");

inline __m512bh as_pairs(__m512i v) { return __m512bh(v); }

// Group of 64 columns -> two vectors of pairs. `order` puts an arranged x in the same order. WIDE: the most x that four rows
// take at once; ROWS: that take more. POWERS: whether a group has two scales in e8m0, of 32 columns each.
struct PairsBf16 {
  static constexpr int BYTES = 128, WIDE = 6, ROWS = 3;
  static constexpr bool POWERS = false;
  inline INLINE void operator()(const uint8_t *p, __m512i (&w)[2]) const {
    w[0] = _mm512_loadu_si512(p);
    w[1] = _mm512_loadu_si512(p + 64);
  }
  static inline void order(__m512i (&)[2]) {}
};

// The two bytes of |number| in bf16 for each of the 128 codes without a sign; code 127 is NaN.
struct E4m3Bytes {
  alignas(64) uint8_t low[128], high[128];
  constexpr E4m3Bytes() : low(), high() {
    for (int code = 0; code < 128; code++) {
      int exponent = code >> 3, mantissa = code & 7;
      if (!exponent && mantissa) {  // subnormal
        for (exponent = 1; mantissa < 8; exponent--) mantissa *= 2;
        mantissa &= 7;
      }
      const int bits = code == 127 ? 0x7fc0 : code ? (exponent + 120) << 7 | mantissa << 4 : 0;
      low[code] = uint8_t(bits & 255);
      high[code] = uint8_t(bits >> 8);
    }
  }
};
constexpr E4m3Bytes e4m3_bytes;  // known when compiled: nothing here may run before the CPU is known

struct PairsE4m3 {
  static constexpr int BYTES = 64, WIDE = 4, ROWS = 2;
  static constexpr bool POWERS = false;
  const __m512i low0 = _mm512_load_si512(e4m3_bytes.low), low1 = _mm512_load_si512(e4m3_bytes.low + 64);
  const __m512i high0 = _mm512_load_si512(e4m3_bytes.high), high1 = _mm512_load_si512(e4m3_bytes.high + 64);
  inline INLINE void operator()(const uint8_t *p, __m512i (&w)[2]) const {
    const __m512i v = _mm512_loadu_si512(p);
    const __m512i low = _mm512_permutex2var_epi8(low0, v, low1);  // by the low seven bits
    const __m512i sign = _mm512_and_si512(v, _mm512_set1_epi8(-128));
    const __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high0, v, high1), sign);
    w[0] = _mm512_unpacklo_epi8(low, high);  // the first eight of each sixteen columns
    w[1] = _mm512_unpackhi_epi8(low, high);
  }
  static inline void order(__m512i (&x)[2]) {
    const __m512i first = x[0], second = x[1];
    x[0] = _mm512_shuffle_i64x2(first, second, 0x88);
    x[1] = _mm512_shuffle_i64x2(first, second, 0xdd);
  }
};

struct PairsMxfp8 : PairsE4m3 {
  static constexpr bool POWERS = true;
};

// Of a group's pairs lanes 0 to 7 are of its first 32 columns.
inline INLINE Vec pairs_powers(const uint8_t *codes) {
  return _mm512_mask_blend_ps(0xff00, set1(power(codes[0])), set1(power(codes[1])));
}

inline int64_t pairs_groups(int64_t k) { return (k + PAIRS_GROUP - 1) / PAIRS_GROUP; }

// Adds the products of groups [begin, end) of R rows with N x to their sums. codes: of POWERS, a row's.
template <class F, int R, int N>
inline INLINE void pairs_groups_product(const F &decode, const uint8_t *const (&rows)[R], const uint8_t *const (&codes)[R],
                                        const uint8_t *const (&x)[N], int64_t begin, int64_t end, int64_t ahead,
                                        Vec (&sums)[R][N]) {
  for (int64_t g = begin; g < end; g++) {
    __m512i w[R][2];
    Vec scales[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      if constexpr (F::POWERS) scales[r] = pairs_powers(codes[r] + 2 * g);
      fetch(rows[r] + g * F::BYTES + ahead);
      if (F::BYTES > 64) fetch(rows[r] + g * F::BYTES + ahead + 64);
      decode(rows[r] + g * F::BYTES, w[r]);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const __m512i *at = reinterpret_cast<const __m512i *>(x[n] + g * 128);
      const __m512i first = _mm512_load_si512(at), second = _mm512_load_si512(at + 1);
      if constexpr (F::POWERS) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const Vec some = _mm512_dpbf16_ps(zero(), as_pairs(w[r][0]), as_pairs(first));
          sums[r][n] = fma(_mm512_dpbf16_ps(some, as_pairs(w[r][1]), as_pairs(second)), scales[r], sums[r][n]);
        }
        continue;
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], as_pairs(w[r][0]), as_pairs(first));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], as_pairs(w[r][1]), as_pairs(second));
    }
  }
}

// The sums across sixteen vectors, `step` apart: 45 operations, where one alone takes 9.
inline Vec sums_across(const Vec *v, int step) {
  Vec a[8], b[4];
  for (int i = 0; i < 8; i++) {
    const Vec first = v[2 * i * step], second = v[(2 * i + 1) * step];
    a[i] = add(_mm512_unpacklo_ps(first, second), _mm512_unpackhi_ps(first, second));
  }
  for (int i = 0; i < 4; i++) {
    const __m512d first = _mm512_castps_pd(a[2 * i]), second = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)), _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  }  // b[i]: in each quarter what is there of the sums 4 * i to 4 * i + 3
  const Vec low = add(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  const Vec high = add(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// R rows times N x, groups [begin, end): `all` are the scaled sums so far. unscaled: x has the scales in it already.
template <class F, int R, int N>
inline INLINE void pairs_tile(const Matrix &a, const F &decode, int64_t row, const uint8_t *const (&x)[N], int64_t begin,
                              int64_t end, int64_t ahead, Vec (*all)[N], bool unscaled = false) {
  const int64_t whole = a.k / PAIRS_GROUP, block = a.format == E4M3 && !unscaled ? a.block_k / PAIRS_GROUP : 0;
  const int64_t each = block ? block : end;
  const uint8_t *rows[R], *codes[R];
  const float *scales[R];
  for (int r = 0; r < R; r++) {
    rows[r] = a.values + (row + r) * a.row_bytes;
    codes[r] = a.scales + (row + r) * a.scale_row;
    scales[r] = a.format == E4M3 && !unscaled ? segment_scales(a, row + r) : nullptr;
  }
  Vec sums[R][N];
  int64_t segment = begin / each;  // begins there
  for (int64_t g = begin; g < end; segment++) {
    const int64_t next = (segment + 1) * each, stop = next < end ? next : end;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[r][n] = zero();
    pairs_groups_product<F, R, N>(decode, rows, codes, x, g, stop < whole ? stop : whole, ahead, sums);
    if (stop > whole && g <= whole) {
      alignas(64) uint8_t last[R][F::BYTES] = {}, last_codes[R][2] = {};
      const uint8_t *from[R], *codes_from[R];
      for (int r = 0; r < R; r++) {
        if constexpr (F::POWERS) std::memcpy(last_codes[r], codes[r] + 2 * whole, size_t(a.scale_row - 2 * whole));
        codes_from[r] = last_codes[r] - 2 * whole;
        std::memcpy(last[r], rows[r] + whole * F::BYTES, size_t(a.row_bytes - whole * F::BYTES));
        from[r] = last[r] - whole * F::BYTES;
      }
      pairs_groups_product<F, R, N>(decode, from, codes_from, x, whole, stop, 0, sums);
    }
    for (int r = 0; r < R; r++) {
      const Vec scale = set1(scales[r] ? scales[r][segment] * a.factor : a.factor);
      for (int n = 0; n < N; n++) all[r][n] = fma(sums[r][n], scale, all[r][n]);
    }
    g = stop;
  }
}

// Groups [0, count) of x as pairs in the decoder's order, times scale(group); zeros behind k columns.
template <class F, class Scale>
inline INLINE void pairs_arrange_as(const float *x, int64_t k, int64_t count, Scale scale, uint8_t *out) {
  for (int64_t g = 0; g < count; g++, x += PAIRS_GROUP, out += 2 * PAIRS_GROUP) {
    alignas(64) float last[PAIRS_GROUP];
    const float *from = x;
    if (k - g * PAIRS_GROUP < PAIRS_GROUP) {
      std::memset(last, 0, sizeof last);
      std::memcpy(last, x, size_t(k - g * PAIRS_GROUP) * 4);
      from = last;
    }
    const Vec by = set1(scale(g));
    __m512i pairs[2];
    for (int i = 0; i < 2; i++)
      pairs[i] = __m512i(_mm512_cvtne2ps_pbh(mul(_mm512_loadu_ps(from + 32 * i + 16), by), mul(_mm512_loadu_ps(from + 32 * i), by)));
    F::order(pairs);
    _mm512_store_si512(out, pairs[0]);
    _mm512_store_si512(out + 64, pairs[1]);
  }
}

inline int64_t pairs_bytes(int64_t k) {
  const int64_t lines = 2 * pairs_groups(k);
  return (lines > 0) * (lines + 1) * 64;
}

// Scales of blocks that many rows share multiply x, in fp32 before it is rounded. Multiplying the sums of every 128 columns
// instead takes half as long as their products.
inline bool pairs_scale_x(const Matrix &a) { return a.format == E4M3 && a.block_k && a.block_n >= PAIRS_SHARED; }

// x times the scales of `row`'s blocks, groups [begin, end), as pairs at `scaled`; gives where x would then begin.
template <class F>
inline const uint8_t *pairs_scaled(const Matrix &a, const uint8_t *x, int64_t row, int64_t begin, int64_t end, uint8_t *scaled) {
  const float *numbers = reinterpret_cast<const float *>(x + pairs_bytes(a.k)) + begin * PAIRS_GROUP;
  const float *scales = segment_scales(a, row);
  const int64_t block = a.block_k / PAIRS_GROUP;
  pairs_arrange_as<F>(numbers, a.k - begin * PAIRS_GROUP, end - begin,
                      [&](int64_t g) INLINE { return scales[(begin + g) / block]; }, scaled);
  return scaled - begin * 2 * PAIRS_GROUP;
}

template <class F, int N>
void pairs_rows(const Matrix &a, const uint8_t *const *from, int64_t begin, int64_t end, float *y, int64_t stride) {
  constexpr int R = N == 1 ? 1 : N <= F::WIDE ? 4 : F::ROWS;  // as many sums as fit the registers beside the rest
  const F decode;
  const int64_t count = pairs_groups(a.k), block = a.format == E4M3 ? a.block_k / PAIRS_GROUP : 0;
  int64_t tile = N == 1 ? count : PAIRS_TILE / PAIRS_GROUP;
  const bool scale_x = N > 1 && pairs_scale_x(a);
  if (block && !scale_x) tile = (tile + block - 1) / block * block;  // whole segments
  const int64_t ahead = N == 1 ? AHEAD : R * a.row_bytes;
  const uint8_t *x[N];
  for (int n = 0; n < N; n++) x[n] = from[n];
  alignas(64) uint8_t scaled[N][2 * PAIRS_TILE];
  Vec all[PAIRS_ROWS][N];
  for (int64_t row = begin, next; row < end; row = next) {
    next = row + PAIRS_ROWS;
    if (scale_x && next > (row / a.block_n + 1) * a.block_n) next = (row / a.block_n + 1) * a.block_n;
    if (next > end) next = end;
    const int rows = int(next - row);
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < N; n++) all[r][n] = zero();
    for (int64_t t = 0; t < count; t += tile) {
      const int64_t stop = t + tile < count ? t + tile : count;
      if (scale_x)
        for (int n = 0; n < N; n++) x[n] = pairs_scaled<F>(a, from[n], row, t, stop, scaled[n]);
      int r = 0;
      for (; r + R <= rows; r += R) pairs_tile<F, R, N>(a, decode, row + r, x, t, stop, ahead, all + r, scale_x);
      if constexpr (R > 1)
        for (; r < rows; r++) pairs_tile<F, 1, N>(a, decode, row + r, x, t, stop, ahead, all + r, scale_x);
    }
    for (int r = rows; r % 16; r++)
      for (int n = 0; n < N; n++) all[r][n] = zero();
    for (int r = 0; r < rows; r += 16) {
      const __mmask16 some = rows - r < 16 ? __mmask16((1 << (rows - r)) - 1) : __mmask16(-1);
      for (int n = 0; n < N; n++) _mm512_mask_storeu_ps(y + n * stride + row + r - begin, some, sums_across(all[r] + n, N));
    }
  }
}

template <class F>
void pairs_multiply_as(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                       int64_t stride) {
  for (; m > 0; m -= 8, x += 8, y += 8 * stride) {
    switch (m) {
      case 1: return pairs_rows<F, 1>(a, x, begin, end, y, stride);
      case 2: return pairs_rows<F, 2>(a, x, begin, end, y, stride);
      case 3: return pairs_rows<F, 3>(a, x, begin, end, y, stride);
      case 4: return pairs_rows<F, 4>(a, x, begin, end, y, stride);
      case 5: return pairs_rows<F, 5>(a, x, begin, end, y, stride);
      case 6: return pairs_rows<F, 6>(a, x, begin, end, y, stride);
      case 7: return pairs_rows<F, 7>(a, x, begin, end, y, stride);
      default: pairs_rows<F, 8>(a, x, begin, end, y, stride);
    }
  }
}

bool paired(const Matrix &a) {
  return !a.exact && (a.format == BF16 || a.format == MXFP8 || (a.format == E4M3 && a.block_k % PAIRS_GROUP == 0));
}

// e4m3 keeps x as it came behind its pairs: see pairs_scale_x.
int64_t pairs_arranged(const Matrix &a) {
  return pairs_bytes(a.k) + (a.format == E4M3) * pairs_groups(a.k) * PAIRS_GROUP * 4;
}

void pairs_arrange(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out) {
  const auto one = [](int64_t) INLINE { return 1.0f; };
  const int64_t count = pairs_groups(a.k);
  for (int64_t b = 0; b < m; b++, x += stride, out += pairs_arranged(a)) {
    a.format == BF16 ? pairs_arrange_as<PairsBf16>(x, a.k, count, one, out) : pairs_arrange_as<PairsE4m3>(x, a.k, count, one, out);
    if (a.format == E4M3) std::memcpy(out + pairs_bytes(a.k), x, size_t(a.k) * 4);
  }
}

void pairs_multiply(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                    int64_t stride) {
  a.format == BF16    ? pairs_multiply_as<PairsBf16>(a, x, m, begin, end, y, stride)
  : a.format == MXFP8 ? pairs_multiply_as<PairsMxfp8>(a, x, m, begin, end, y, stride)
                      : pairs_multiply_as<PairsE4m3>(a, x, m, begin, end, y, stride);
}

}  // namespace
}  // namespace oddrank
