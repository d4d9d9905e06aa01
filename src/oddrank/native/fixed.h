// Products by integers, see fixed_x.h: over the words and the groups of one level, which are included before.
#pragma once

namespace oddrank {
namespace {

template <class S>
void arrange_fixed(const float *x, int64_t k, uint8_t *out) {
  constexpr int GROUP = S::GROUP;
  const int64_t count = S::groups(k), blocks = S::blocks(k);
  float *scales = S::scales(out, k);
  float most = 0;
  alignas(32) float block[GROUP];
  const auto at = [&](int64_t g) {
    const float *from = x + g * GROUP;
    if ((g + 1) * GROUP <= k) return from;
    std::memset(block, 0, sizeof block);
    std::memcpy(block, from, size_t(k - g * GROUP) * 4);
    return static_cast<const float *>(block);
  };
  for (int64_t b = 0; b < blocks; b++) {
    __m256 largest = _mm256_setzero_ps(), finite = _mm256_setzero_ps();
    for (int64_t g = b * S::GROUPS; g < count && g < (b + 1) * S::GROUPS; g++) {
      const float *from = at(g);
      for (int i = 0; i < GROUP; i += 8) {
        const __m256 v = _mm256_loadu_ps(from + i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
        finite = _mm256_add_ps(finite, _mm256_sub_ps(v, v));  // NaN where one is not
      }
    }
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, largest);
    float here = 0;
    for (float lane : lanes) here = lane > here ? lane : here;
    if (_mm256_movemask_ps(_mm256_cmp_ps(finite, finite, _CMP_UNORD_Q))) here = NAN;
    scales[b] = here;
    most = here > most ? here : most;
  }
  int exponent = 0, shift = 0;
  if (most > 0) {
    std::frexp(most, &exponent);
    exponent -= 15;  // of the largest block's scale
    shift = exponent < S::LEAST ? S::LEAST - exponent : exponent > S::MOST ? S::MOST - exponent : 0;
  }
  for (int64_t g = 0; g < count; g++) {
    const float largest = scales[g / S::GROUPS];
    const float *from = at(g);
    uint8_t *to = out + g * S::WORDS;
    if (largest > 0x1p-100f && largest < 0x1p126f) {
      fixed_words(from, 32767.0f / largest, to);
    } else if (largest > 0) {
      const float up = largest < 1 ? 0x1p100f : 0x1p-100f;  // both powers: 2^-149 and 2^127 come well inside
      alignas(32) float moved[GROUP];
      for (int i = 0; i < GROUP; i++) moved[i] = from[i] * up;
      fixed_words(moved, 32767.0f / (largest * up), to);
    } else {
      std::memset(to, 0, S::WORDS);  // zeros, or NaN
    }
    if constexpr (S::ZEROS) fixed_sums<S::SUM_BITS>(to);
  }
  for (int64_t b = 0; b < blocks; b++)
    if (scales[b] > 0) scales[b] = float(std::ldexp(double(scales[b]) / 32767, shift));
  *S::back(out, k) = std::ldexp(S::UNIT / S::INTEGER, -shift);
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

template <class S, int N>
void fixed_rows(const Matrix &a, const uint8_t *const *from, int64_t begin, int64_t end, float *y, int64_t stride) {
  constexpr int BYTES = S::BYTES, TILE_GROUPS = 2 * S::GROUPS;  // of eight x about half of the first cache
  const int64_t count = S::groups(a.k), full = a.k / S::GROUP, tile = N == 1 ? count : TILE_GROUPS;
  const int64_t ahead = N == 1 ? AHEAD : 4 * a.row_bytes;  // of a tile: the same columns of later rows
  const int64_t x_scales = count * S::WORDS;
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
        for (int b = 0; b < N; b++) sums[b] = S::EARLY && t ? all[r][b] : zero();
        for (int64_t g = t; g < stop;) {
          const int64_t block = g / S::GROUPS, next = (block + 1) * S::GROUPS, scale = x_scales + block * 4;
          for (; g < next && g < whole; g++) {
            for (int line = 0; line < BYTES; line += 64) fetch(values + g * BYTES + ahead + line);
            fixed_group<S, N>(values + g * BYTES, codes + g * S::SCALE_BYTES, x, g * S::WORDS, scale, sums);
          }
          if (g < next && g < stop) {
            uint8_t last[BYTES] = {}, last_codes[S::SCALE_BYTES] = {};
            std::memcpy(last, values + g * BYTES, size_t(a.row_bytes - g * BYTES));
            std::memcpy(last_codes, codes + g * S::SCALE_BYTES, size_t(a.scale_row - g * S::SCALE_BYTES));
            fixed_group<S, N>(last, last_codes, x, g * S::WORDS, scale, sums);
            g++;
          }
          if constexpr (!S::EARLY)
            for (int b = 0; b < N; b++) {
              const Vec of_x = set1(*reinterpret_cast<const float *>(x[b] + scale));
              all[r][b] = fma(sums[b], of_x, block ? all[r][b] : zero());
              sums[b] = zero();
            }
        }
        if constexpr (S::EARLY)
          for (int b = 0; b < N; b++) all[r][b] = sums[b];
      }
    }
    for (int r = 0; r < rows; r++) {
      bool bad = false;
      if constexpr (S::CODES) bad = fixed_bad<S>(a.scales + (row + r) * a.scale_row, a.scale_row);
      for (int b = 0; b < N; b++) {
        const double back = *S::back(const_cast<uint8_t *>(x[b]), a.k) * double(a.factor);
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

bool fixed(const Matrix &a) {
  const int32_t f = a.format;
  return !a.exact && (f == NVFP4 || f == MXFP4 || f == INT4 || f == INT8 || f == INT8_ZEROS);
}

template <bool ZEROS, class Call>
auto with_fixed_int8(const Matrix &a, Call f) {
  return a.block_k == 32   ? f(FixedInt8<32, ZEROS>())
         : a.block_k == 64 ? f(FixedInt8<64, ZEROS>())
                           : f(FixedInt8<128, ZEROS>());
}

// Calls f with a value of the matrix's type.
template <class Call>
auto with_fixed(const Matrix &a, Call f) {
  if (a.format == NVFP4) return f(FixedNvfp4());
  if (a.format == MXFP4) return f(FixedMxfp4());
  if (a.format == INT8) return with_fixed_int8<false>(a, f);
  if (a.format == INT8_ZEROS) return with_fixed_int8<true>(a, f);
  return a.block_k == 32 ? f(FixedInt4<32>()) : a.block_k == 64 ? f(FixedInt4<64>()) : f(FixedInt4<128>());
}

int64_t fixed_arranged(const Matrix &a) {
  return with_fixed(a, [&](auto s) { return decltype(s)::bytes(a.k); });
}

void fixed_arrange(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out) {
  with_fixed(a, [&](auto s) {
    for (int64_t b = 0; b < m; b++) arrange_fixed<decltype(s)>(x + b * stride, a.k, out + b * decltype(s)::bytes(a.k));
  });
}

void fixed_multiply(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                    int64_t stride) {
  with_fixed(a, [&](auto s) { multiply_fixed<decltype(s)>(a, x, m, begin, end, y, stride); });
}

}  // namespace
}  // namespace oddrank
