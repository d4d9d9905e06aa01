// Products with many x of matrices whose numbers are exact in bf16 but for a scale, by pairs (bf16_pairs.h): as in gemm.h a
// tile of rows is decoded once and multiplied by all x, each x a lane and each pair of weights spread over the lanes. Only x
// is rounded, to the nearest bf16; sums are in fp32.
//
// A scale that would not leave the numbers exact (of a tensor, or e4m3's of a block) multiplies the sums of the columns it
// covers. The order of a sum does not depend on how many x or rows there are.
#pragma once
#include "bf16_lanes.h"

namespace oddrank {
namespace {

constexpr int64_t PAIRS_GEMM_FROM = 64;        // x
constexpr int64_t TILE_PAIRS = 128;             // of a row at a time, at most: those of 32 x are half of the first cache
constexpr int64_t TILE_ROW = TILE_PAIRS + 16;   // pairs from a decoded row to the next, apart from powers of two
static_assert(TILE_ROW <= GEMM_ROW && GEMM_PANEL == LANE_X * LANES_V && GEMM_R == LANES_R, "as gemm_abi.h has room for");

// sums [GEMM_R][GEMM_PANEL] (+)= scales [GEMM_R] * w [GEMM_R][pairs] x [pairs][GEMM_PANEL], of a panel's first V vectors.
// pairs: of 16. Fetches the weights at next_w, as many, to the first cache and an eighth of the x at next_x to the second.
template <int V>
inline INLINE void pairs_gemm_tile(const uint8_t *w, const uint8_t *x, int64_t pairs, bool first, const float *scales,
                                   float *sums, const uint8_t *next_w, const uint8_t *next_x) {
  __m512 s[GEMM_R][V] = {};
  constexpr int64_t ROW = TILE_ROW * 4;
  for (const uint8_t *end = w + 4 * pairs; w < end; next_w += 64, next_x += 64 * 4) {
#pragma GCC unroll 12
    for (int r = 0; r < GEMM_R; r++) fetch(next_w + r * ROW);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) _mm_prefetch(reinterpret_cast<const char *>(next_x + 64 * i), _MM_HINT_T1);
#pragma GCC unroll 4
    for (int p = 0; p < 16; p++, w += 4, x += GEMM_PANEL * 4) {
      __m512bh at[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) at[v] = as_pairs(_mm512_load_si512(x + v * 64));
#pragma GCC unroll 12
      for (int r = 0; r < GEMM_R; r++) {
        const __m512bh weights = as_pairs(pair_of(w + r * ROW));
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) s[r][v] = _mm512_dpbf16_ps(s[r][v], weights, at[v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < GEMM_R; r++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      float *to = sums + r * GEMM_PANEL + v * WIDTH;
      store(to, fma(s[r][v], set1(scales[r]), first ? zero() : load(to)));
    }
}

// Groups [begin, end) of a row as pairs, with the scales that leave them exact. True where a code for NaN was among them.
template <class F>
inline bool pairs_decode(const RowReader<F> &reader, int64_t begin, int64_t end, int64_t ahead, uint8_t *out) {
  constexpr int V = F::GROUP / WIDTH;
  typename F::Seen seen;
  const Vec unit = set1(F::UNIT), none = zero();
  Vec scale[F::SCALES], even;
  for (int64_t g = begin; g < end; g++, out += 2 * F::GROUP) {
    const uint8_t *p = reader.group(g);
    fetch(p + ahead);
    if constexpr (F::KIND == LANES) F::scales(reader.scale(g), unit, scale, seen);
    F::decode(p, seen, [&](int j, Vec w) INLINE {
      if constexpr (F::KIND == LANES) w = fma(w, scale[j / (V / F::SCALES)], none);
      if (j % 2)
        _mm512_store_si512(out + 32 * (j - 1), __m512i(_mm512_cvtne2ps_pbh(w, even)));
      else
        even = w;
    });
  }
  return F::bad(seen);
}

template <class F>
void pairs_gemm_multiply_as(const Matrix &a, const uint8_t *x, int64_t m, int64_t begin, int64_t end, const float *bias,
                            float *y, int64_t stride, float *scratch) {
  const int64_t rows = end - begin, width = groups<F>(a.k) * F::GROUP, steps = (rows + GEMM_R - 1) / GEMM_R;
  const int64_t panels = (m + GEMM_PANEL - 1) / GEMM_PANEL, block = F::KIND == SEGMENT && a.block_k ? a.block_k : width;
  uint8_t *w = reinterpret_cast<uint8_t *>(scratch);
  float *sums = scratch + GEMM_ROWS * GEMM_ROW;  // [panel][steps * GEMM_R][GEMM_PANEL]
  float scales[GEMM_ROWS] = {};
  bool bad[GEMM_ROWS] = {};
  std::memset(w + rows * TILE_ROW * 4, 0, size_t((steps * GEMM_R - rows) * TILE_ROW * 4));
  int64_t next;
  for (int64_t t = 0; t < width; t = next) {
    const int64_t segment = t / block, last = (segment + 1) * block < width ? (segment + 1) * block : width;
    next = t + 2 * TILE_PAIRS < last ? t + 2 * TILE_PAIRS : last;
    for (int64_t r = 0; r < rows; r++) {
      const RowReader<F> reader(a, begin + r);
      bad[r] |= pairs_decode<F>(reader, t / F::GROUP, next / F::GROUP, ROWS * a.row_bytes, w + r * TILE_ROW * 4);
      scales[r] = F::KIND == SEGMENT ? segment_scales(a, begin + r)[segment] * (a.factor * F::UNIT) : a.factor;
    }
    for (int64_t p = 0; p < panels; p++) {
      const uint8_t *panel = x + (p * width + t) * GEMM_PANEL * 2;
      const bool half = m - p * GEMM_PANEL <= WIDTH;
      for (int64_t s = 0; s < steps; s++) {
        const uint8_t *at = w + s * GEMM_R * TILE_ROW * 4, *next_w = s + 1 < steps ? at + GEMM_R * TILE_ROW * 4 : w;
        const uint8_t *next_x = panel + width * GEMM_PANEL * 2 + s * (next - t) * GEMM_PANEL * 2 / steps;
        float *to = sums + (p * steps + s) * GEMM_R * GEMM_PANEL;
        half ? pairs_gemm_tile<1>(at, panel, (next - t) / 2, t == 0, scales + s * GEMM_R, to, next_w, next_x)
             : pairs_gemm_tile<2>(at, panel, (next - t) / 2, t == 0, scales + s * GEMM_R, to, next_w, next_x);
      }
    }
  }
  gemm_give_all(sums, rows, m, bias, bad, y, stride);
}

// x's numbers in the order of the decoder, two a pair: [pairs][GEMM_PANEL]
template <class F>
void pairs_gemm_pack_as(const Matrix &a, const float *const *x, int64_t count, uint8_t *out) {
  const int64_t width = groups<F>(a.k) * F::GROUP;
  for (int64_t t = 0; t < width; t += F::GROUP)
    for (int v = 0; v < LANES_V; v++)
      for (int part = 0; part < F::GROUP / 32; part++) {
        __m512i pairs[LANE_X];
        for (int b = 0; b < LANE_X; b++) {
          alignas(64) float numbers[32] = {};
          if (v * LANE_X + b < count)
            for (int i = 0; i < 32; i++) {
              const int64_t column = t + F::column(32 * part + i);
              if (column < a.k) numbers[i] = x[v * LANE_X + b][column] * F::OF_X;
            }
          pairs[b] = __m512i(_mm512_cvtne2ps_pbh(load(numbers + 16), load(numbers)));
        }
        lanes_turn(pairs, reinterpret_cast<__m512i *>(out + (t + 32 * part) * GEMM_PANEL * 2) + v, LANES_V);
      }
}

// Calls f with the decoder of a format that pairs can be multiplied of.
template <class Call>
void with_pairs(const Matrix &a, Call f) {
  switch (a.format) {
    case BF16: return f(Bf16());
    case E4M3: return f(E4m3());
    case NVFP4: return f(Nvfp4());
    case MXFP4: return f(Mxfp4());
    case MXFP8: return f(Mxfp8());
    default: return;
  }
}

bool gemm_of_pairs(const Matrix &a) { return paired(a) || (!a.exact && (a.format == NVFP4 || a.format == MXFP4)); }

int64_t pairs_gemm_columns(const Matrix &a) {
  int64_t found = 0;
  with_pairs(a, [&](auto f) { found = groups<decltype(f)>(a.k) * decltype(f)::GROUP / 2; });
  return found;
}

void pairs_gemm_pack(const Matrix &a, const float *const *x, int64_t count, float *out) {
  with_pairs(a, [&](auto f) { pairs_gemm_pack_as<decltype(f)>(a, x, count, reinterpret_cast<uint8_t *>(out)); });
}

void pairs_gemm_multiply(const Matrix &a, const float *x, int64_t m, int64_t begin, int64_t end, const float *bias,
                         float *y, int64_t stride, float *scratch) {
  with_pairs(a, [&](auto f) {
    pairs_gemm_multiply_as<decltype(f)>(a, reinterpret_cast<const uint8_t *>(x), m, begin, end, bias, y, stride, scratch);
  });
}

const Gemm pairs_gemm = {GEMM_PANEL, pairs_gemm_columns, pairs_gemm_pack, pairs_gemm_multiply};

}  // namespace
}  // namespace oddrank
