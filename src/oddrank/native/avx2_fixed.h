// Products of 4-bit floats by integers, for the AVX2 level: what matrices that are not `exact` take.
//
// x becomes 16-bit integers, scaled by blocks of GROUP columns: x = integer * scale, off by at most 2^-16 of the block's
// largest |x| (bf16 would round by 2^-9 of each). Twice an e2m1 number is an integer, so a block's product is one too and
// exact; it is converted once, multiplied by both scales and summed in fp32.
//
// 64 bytes are GROUP columns, eight blocks of 16: a block's first four bytes go to a 32-bit lane, its last four to the
// same lane of another vector. One look-up makes signed bytes of the low nibbles, one of the high; words that have one of
// them on top (256 times the number) are multiplied by x's words. A lane's sum is then of one block, so scales need no
// more than to be put in the lanes' order, which is blocks 0 1 4 5 2 3 6 7.
//
// An arranged x: GROUP words a block; then a float a block, scale times a power of two that keeps all products in range;
// then a double that takes that power back. A block that is not finite has NaN for its scale.
#pragma once

namespace oddrank {
namespace {

struct FixedX {
  static constexpr int GROUP = 128, WORDS = 2 * GROUP;

  static int64_t groups(int64_t k) { return (k + GROUP - 1) / GROUP; }
  // An odd multiple of half of what the first cache's ways are apart: several x do not push each other out.
  static int64_t bytes(int64_t k) {
    const int64_t used = (groups(k) * (WORDS + 4) + 15) / 8 * 8;
    return ((used + 2047) / 4096 * 2 + 1) * 2048;
  }
  static float *scales(uint8_t *x, int64_t k) { return reinterpret_cast<float *>(x + groups(k) * WORDS); }
  static double *back(uint8_t *x, int64_t k) {
    return reinterpret_cast<double *>(x + (groups(k) * (WORDS + 4) + 7) / 8 * 8);
  }
};

// A scale for each block. LEAST, MOST: between which powers of two the largest scale of x is brought.
struct FixedNvfp4 {
  static constexpr int SCALE_BYTES = 8, LEAST = 90, MOST = 90;
  static constexpr double UNIT = 0x1p120;  // e4m3's bits in fp32's places are 2^-120 times the number
  static inline __m256 scales(const uint8_t *p) {
    int64_t eight;
    __builtin_memcpy(&eight, p, 8);
    const __m256i spread = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 4, -1, -1, -1, 5,  //
                                            -1, -1, -1, 2, -1, -1, -1, 3, -1, -1, -1, 6, -1, -1, -1, 7);
    const __m256i top = _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), spread);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32(top, 4), _mm256_set1_epi32(int(0x87f00000))));
  }
  static bool bad(uint8_t code) { return (code & 0x7f) == 0x7f; }
  static inline __m256i bad(__m256i codes) {
    return _mm256_cmpeq_epi8(_mm256_or_si256(codes, _mm256_set1_epi8(-128)), _mm256_set1_epi8(-1));
  }
};

// An exponent for two blocks each.
struct FixedMxfp4 {
  static constexpr int SCALE_BYTES = 4, LEAST = -75, MOST = 45;
  static constexpr double UNIT = 1;
  static inline __m256 scales(const uint8_t *p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    const __m256i spread = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 2,  //
                                            -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 3, -1, -1, -1, 3);
    const __m256i top = _mm256_shuffle_epi8(_mm256_set1_epi32(four), spread);
    // code 0 is 2^-127
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_srli_epi32(top, 1), _mm256_set1_epi32(0x00400000)));
  }
  static bool bad(uint8_t code) { return code == 0xff; }
  static inline __m256i bad(__m256i codes) { return _mm256_cmpeq_epi8(codes, _mm256_set1_epi8(-1)); }
};

// The words of GROUP numbers that multiplied by `inverse` are at most 32767, in the order above.
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

template <class S>
void arrange_fixed(const float *x, int64_t k, uint8_t *out) {
  constexpr int GROUP = FixedX::GROUP;
  const int64_t count = FixedX::groups(k);
  float *scales = FixedX::scales(out, k);
  float most = 0;
  alignas(32) float block[GROUP];
  const auto at = [&](int64_t g) {
    const float *from = x + g * GROUP;
    if ((g + 1) * GROUP <= k) return from;
    std::memset(block, 0, sizeof block);
    std::memcpy(block, from, size_t(k - g * GROUP) * 4);
    return static_cast<const float *>(block);
  };
  for (int64_t g = 0; g < count; g++) {
    const float *from = at(g);
    __m256 largest = _mm256_setzero_ps(), finite = _mm256_setzero_ps();
    for (int i = 0; i < GROUP; i += 8) {
      const __m256 v = _mm256_loadu_ps(from + i);
      largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
      finite = _mm256_add_ps(finite, _mm256_sub_ps(v, v));  // NaN where one is not
    }
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, largest);
    float here = 0;
    for (float lane : lanes) here = lane > here ? lane : here;
    if (_mm256_movemask_ps(_mm256_cmp_ps(finite, finite, _CMP_UNORD_Q))) here = NAN;
    scales[g] = here;
    most = here > most ? here : most;
  }
  int exponent = 0, shift = 0;
  if (most > 0) {
    std::frexp(most, &exponent);
    exponent -= 15;  // of the largest block's scale
    shift = exponent < S::LEAST ? S::LEAST - exponent : exponent > S::MOST ? S::MOST - exponent : 0;
  }
  for (int64_t g = 0; g < count; g++) {
    const float largest = scales[g];
    const float *from = at(g);
    uint8_t *to = out + g * FixedX::WORDS;
    if (largest > 0x1p-100f && largest < 0x1p126f) {
      fixed_words(from, 32767.0f / largest, to);
      scales[g] = float(std::ldexp(double(largest) / 32767, shift));
    } else if (largest > 0) {
      const float up = largest < 1 ? 0x1p100f : 0x1p-100f;  // both powers: 2^-149 and 2^127 come well inside
      alignas(32) float moved[GROUP];
      for (int i = 0; i < GROUP; i++) moved[i] = from[i] * up;
      fixed_words(moved, 32767.0f / (largest * up), to);
      scales[g] = float(std::ldexp(double(largest) / 32767, shift));
    } else {
      std::memset(to, 0, FixedX::WORDS);  // zeros, or NaN
    }
  }
  *FixedX::back(out, k) = std::ldexp(S::UNIT, -9 - shift);  // words are 256 times twice the weights
}

// Four nibbles of each word -> words with one of them, as 512 times its number, each.
inline INLINE void fixed_weights(__m256i v, __m256i (&w)[4]) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
  const __m256i nibble = _mm256_set1_epi8(0x0f), upper = _mm256_set1_epi16(short(0xff00));
  const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(v, nibble));
  const __m256i odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
  w[0] = _mm256_slli_epi16(even, 8);
  w[1] = _mm256_slli_epi16(odd, 8);
  w[2] = _mm256_and_si256(even, upper);
  w[3] = _mm256_and_si256(odd, upper);
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
  const __m256 a = _mm256_loadu_ps(reinterpret_cast<const float *>(p));
  const __m256 b = _mm256_loadu_ps(reinterpret_cast<const float *>(p + 32));
  __m256i first[4], second[4];
  fixed_weights(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), first);
  fixed_weights(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), second);
  const __m256 scale = S::scales(s);
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) {
    const uint8_t *at = x[i] + words;
    const __m256i total = _mm256_add_epi32(fixed_sum(first, at), fixed_sum(second, at + 128));
    const __m256 of_x = _mm256_broadcast_ss(reinterpret_cast<const float *>(x[i] + scales));
    sums[i] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(total), of_x), scale, sums[i]);
  }
}

template <class S>
bool fixed_bad(const uint8_t *codes, int64_t count) {
  __m256i found = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= count; i += 32)
    found = _mm256_or_si256(found, S::bad(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + i))));
  bool bad = _mm256_movemask_epi8(found) != 0;
  for (; i < count; i++) bad |= S::bad(codes[i]);
  return bad;
}

constexpr int FIXED_ROWS = 32;  // rows that take a tile of x before the next one
constexpr int FIXED_TILE = 8;   // groups of a tile: of eight x half of the first cache

template <class S, int N>
void fixed_rows(const Matrix &a, const uint8_t *const *from, int64_t begin, int64_t end, float *y, int64_t stride) {
  constexpr int BYTES = FixedX::GROUP / 2;
  const int64_t count = FixedX::groups(a.k), full = a.k / FixedX::GROUP, tile = N == 1 ? count : FIXED_TILE;
  const int64_t ahead = N == 1 ? AHEAD : 4 * a.row_bytes;  // of a tile: the same columns of later rows
  const int64_t x_scales = count * FixedX::WORDS;
  const uint8_t *x[N];
  for (int b = 0; b < N; b++) x[b] = from[b];
  Vec all[FIXED_ROWS][N];
  for (int64_t row = begin; row < end; row += FIXED_ROWS) {
    const int rows = end - row < FIXED_ROWS ? int(end - row) : FIXED_ROWS;
    for (int64_t t = 0; t < count; t += tile) {
      const int64_t stop = t + tile < count ? t + tile : count, whole = stop < full ? stop : full;
      for (int r = 0; r < rows; r++) {
        const uint8_t *values = a.values + (row + r) * a.row_bytes, *codes = a.scales + (row + r) * a.scale_row;
        Vec sums[N];
        for (int b = 0; b < N; b++) sums[b] = t ? all[r][b] : zero();
        int64_t g = t;
        for (; g < whole; g++) {
          fetch(values + g * BYTES + ahead);
          fixed_group<S, N>(values + g * BYTES, codes + g * S::SCALE_BYTES, x, g * FixedX::WORDS, x_scales + g * 4, sums);
        }
        for (; g < stop; g++) {
          uint8_t last[BYTES] = {}, last_codes[8] = {};
          std::memcpy(last, values + g * BYTES, size_t(a.row_bytes - g * BYTES));
          std::memcpy(last_codes, codes + g * S::SCALE_BYTES, size_t(a.scale_row - g * S::SCALE_BYTES));
          fixed_group<S, N>(last, last_codes, x, g * FixedX::WORDS, x_scales + g * 4, sums);
        }
        for (int b = 0; b < N; b++) all[r][b] = sums[b];
      }
    }
    for (int r = 0; r < rows; r++) {
      const bool bad = fixed_bad<S>(a.scales + (row + r) * a.scale_row, a.scale_row);
      for (int b = 0; b < N; b++) {
        const double back = *FixedX::back(const_cast<uint8_t *>(x[b]), a.k) * double(a.factor);
        y[b * stride + row + r - begin] = bad ? NAN : float(double(sum(all[r][b])) * back);
      }
    }
  }
}

template <class S>
void multiply_fixed(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                    int64_t stride) {
  for (; m > 0; m -= 8, x += 8, y += 8 * stride) {
    switch (m) {
      case 1: return fixed_rows<S, 1>(a, x, begin, end, y, stride);
      case 2: return fixed_rows<S, 2>(a, x, begin, end, y, stride);
      case 3: return fixed_rows<S, 3>(a, x, begin, end, y, stride);
      case 4: return fixed_rows<S, 4>(a, x, begin, end, y, stride);
      case 5: return fixed_rows<S, 5>(a, x, begin, end, y, stride);
      case 6: return fixed_rows<S, 6>(a, x, begin, end, y, stride);
      case 7: return fixed_rows<S, 7>(a, x, begin, end, y, stride);
      default: fixed_rows<S, 8>(a, x, begin, end, y, stride);
    }
  }
}

bool fixed(const Matrix &a) { return !a.exact && (a.format == NVFP4 || a.format == MXFP4); }

int64_t arranged_here(const Matrix &a) { return fixed(a) ? FixedX::bytes(a.k) : arranged(a); }

void arrange_here(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out) {
  if (!fixed(a)) return arrange(a, x, m, stride, out);
  for (int64_t b = 0; b < m; b++, x += stride, out += FixedX::bytes(a.k))
    a.format == NVFP4 ? arrange_fixed<FixedNvfp4>(x, a.k, out) : arrange_fixed<FixedMxfp4>(x, a.k, out);
}

void multiply_here(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                   int64_t stride) {
  if (!fixed(a)) return multiply(a, x, m, begin, end, y, stride);
  a.format == NVFP4 ? multiply_fixed<FixedNvfp4>(a, x, m, begin, end, y, stride)
                    : multiply_fixed<FixedMxfp4>(a, x, m, begin, end, y, stride);
}

}  // namespace
}  // namespace oddrank
