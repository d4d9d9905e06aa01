// Products of a stored matrix with many x, over the vectors and decoders of one level (see kernels.h, which is included
// before): a tile of rows is decoded into fp32 once and multiplied by all x. What remains is a product of two dense
// matrices whose inner loop keeps GEMM_R x 2 vectors of sums in registers, each x a lane and each row a scalar: a step
// loads two vectors of x and spreads GEMM_R weights for 2 GEMM_R multiplications.
//
// The order of a sum is that of the level's columns, in stretches of at most GEMM_COLUMNS; it does not depend on how many x or
// rows there are, nor on who computes which.
#include "gemm_abi.h"
#include "transpose.h"

namespace oddrank {
namespace {

constexpr int GEMM_R = WIDTH == 16 ? 12 : 6;
constexpr int GEMM_PANEL = 2 * WIDTH;
static_assert(GEMM_ROWS % GEMM_R == 0, "rows are decoded for whole steps of the kernel");

// sums [GEMM_R][GEMM_PANEL] (+)= w [GEMM_R][columns] x [columns][GEMM_PANEL], of a panel's first VECTORS vectors.
template <int VECTORS>
inline INLINE void gemm_tile(const float *w, const float *x, int64_t columns, bool first, const float *next,
                             float *sums) {
  Vec s[GEMM_R][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < GEMM_R; r++)
    for (int v = 0; v < VECTORS; v++) s[r][v] = zero();
  for (int64_t start = 0; start < columns; start += 16) {
    for (int r = 0; r < GEMM_R; r++) __builtin_prefetch(next + r * GEMM_ROW + start);
    for (int64_t c = start; c < start + 16; c++) {
      Vec at[VECTORS];
      for (int v = 0; v < VECTORS; v++) at[v] = load(x + c * GEMM_PANEL + v * WIDTH);
#pragma GCC unroll 12
      for (int r = 0; r < GEMM_R; r++) {
        const Vec weight = set1(w[r * GEMM_ROW + c]);
        for (int v = 0; v < VECTORS; v++) s[r][v] = fma(weight, at[v], s[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < GEMM_R; r++)
    for (int v = 0; v < VECTORS; v++) {
      float *to = sums + r * GEMM_PANEL + v * WIDTH;
      store(to, first ? s[r][v] : add(load(to), s[r][v]));
    }
}

// Columns decoded at a time: stretches of about the same length.
template <class F>
int64_t gemm_stretch(int64_t width) {
  const int64_t count = (width + GEMM_COLUMNS - 1) / GEMM_COLUMNS, each = (width + count - 1) / count;
  return (each + F::GROUP - 1) / F::GROUP * F::GROUP;
}

// y[b * stride + r] = sums[r][b] of a panel, plus bias[r].
inline void gemm_give(const float *sums, int64_t rows, int64_t count, const float *bias, float *y, int64_t stride) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    int64_t b = 0;
    for (; b + 8 <= count; b += 8)
      transpose8([&](int i) INLINE { return sums + (r + i) * GEMM_PANEL + b; }, y + b * stride + r, stride);
    for (; b < count; b++)
      for (int64_t i = r; i < r + 8; i++) y[b * stride + i] = sums[i * GEMM_PANEL + b];
  }
  for (int64_t b = 0; b < count; b++)
    for (int64_t i = r; i < rows; i++) y[b * stride + i] = sums[i * GEMM_PANEL + b];
  if (bias)
    for (int64_t b = 0; b < count; b++)
      for (int64_t i = 0; i < rows; i++) y[b * stride + i] += bias[i];
}

// y of m x from the sums of `rows` rows, which lie in whole steps of the kernel; NaN in the rows that are `bad`.
inline void gemm_give_all(const float *sums, int64_t rows, int64_t m, const float *bias, const bool *bad, float *y,
                          int64_t stride) {
  const int64_t padded = (rows + GEMM_R - 1) / GEMM_R * GEMM_R;
  for (int64_t first = 0; first < m; first += GEMM_PANEL) {
    const int64_t count = m - first < GEMM_PANEL ? m - first : GEMM_PANEL;
    gemm_give(sums + first * padded, rows, count, bias, y + first * stride, stride);
  }
  for (int64_t r = 0; r < rows; r++)
    if (bad[r])
      for (int64_t b = 0; b < m; b++) y[b * stride + r] = NAN;
}

template <class F>
void gemm_multiply_as(const Matrix &a, const float *x, int64_t m, int64_t begin, int64_t end, const float *bias,
                      float *y, int64_t stride, float *scratch) {
  const int64_t rows = end - begin, width = groups<F>(a.k) * F::GROUP, steps = (rows + GEMM_R - 1) / GEMM_R;
  const int64_t panels = (m + GEMM_PANEL - 1) / GEMM_PANEL, stretch = gemm_stretch<F>(width);
  float *w = scratch, *sums = scratch + GEMM_ROWS * GEMM_ROW;  // sums: [panel][steps * GEMM_R][GEMM_PANEL]
  bool bad[GEMM_ROWS] = {};
  for (int64_t r = rows; r < steps * GEMM_R; r++) std::memset(w + r * GEMM_ROW, 0, GEMM_ROW * 4);
  for (int64_t t = 0; t < width; t += stretch) {
    const int64_t columns = width - t < stretch ? width - t : stretch;
    for (int64_t r = 0; r < rows; r++) {
      const RowReader<F> reader(a, begin + r);
      bad[r] |= decode_groups<F>(a, reader, begin + r, t / F::GROUP, (t + columns) / F::GROUP, w + r * GEMM_ROW);
    }
    for (int64_t p = 0; p < panels; p++) {
      const float *panel = x + (p * width + t) * GEMM_PANEL;
      const bool half = m - p * GEMM_PANEL <= WIDTH;
      for (int64_t s = 0; s < steps; s++) {
        const float *at = w + s * GEMM_R * GEMM_ROW, *next = s + 1 < steps ? at + GEMM_R * GEMM_ROW : w;
        float *to = sums + (p * steps + s) * GEMM_R * GEMM_PANEL;
        if (half)
          gemm_tile<1>(at, panel, columns, t == 0, next, to);
        else
          gemm_tile<2>(at, panel, columns, t == 0, next, to);
      }
    }
  }
  gemm_give_all(sums, rows, m, bias, bad, y, stride);
}

template <class F>
void gemm_pack_as(const Matrix &a, const float *const *x, int64_t count, float *out) {
  struct Places {  // of each column of a group, among those that are decoded
    int of[F::GROUP];
    Places() {
      for (int i = 0; i < F::GROUP; i++) of[F::column(i)] = i;
    }
  };
  static const Places places;
  const int64_t padded = groups<F>(a.k) * F::GROUP;
  if (count < GEMM_PANEL || padded > a.k) std::memset(out, 0, size_t(padded * GEMM_PANEL) * 4);
  alignas(64) float turned[8][GEMM_PANEL];
  for (int64_t c = 0; c < a.k; c += 8) {
    const int64_t some = a.k - c < 8 ? a.k - c : 8;
    int64_t b = 0;
    if (some == 8)
      for (; b + 8 <= count; b += 8) transpose8([&](int i) INLINE { return x[b + i] + c; }, turned[0] + b, GEMM_PANEL);
    for (; b < count; b++)
      for (int64_t j = 0; j < some; j++) turned[j][b] = x[b][c + j];
    float *group = out + c / F::GROUP * F::GROUP * GEMM_PANEL;
    for (int64_t j = 0; j < some; j++) {
      float *to = group + places.of[(c + j) % F::GROUP] * GEMM_PANEL;
      for (int64_t i = 0; i < count; i++) to[i] = turned[j][i] * F::OF_X;
    }
  }
}

int64_t gemm_columns(const Matrix &a) {
  int64_t found = 0;
  with_format(a, [&](auto f) { found = groups<decltype(f)>(a.k) * decltype(f)::GROUP; });
  return found;
}

void gemm_pack(const Matrix &a, const float *const *x, int64_t count, float *out) {
  with_format(a, [&](auto f) { gemm_pack_as<decltype(f)>(a, x, count, out); });
}

void gemm_multiply(const Matrix &a, const float *x, int64_t m, int64_t begin, int64_t end, const float *bias, float *y,
                   int64_t stride, float *scratch) {
  with_format(a,
              [&](auto f) { gemm_multiply_as<decltype(f)>(a, x, m, begin, end, bias, y, stride, scratch); });
}

const Gemm gemm = {GEMM_PANEL, gemm_columns, gemm_pack, gemm_multiply};

[[maybe_unused]] const Gemm *one_gemm(const Matrix &) { return &gemm; }
[[maybe_unused]] int64_t one_gemm_from(const Matrix &) { return GEMM_FROM; }

}  // namespace
}  // namespace oddrank
