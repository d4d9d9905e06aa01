// The gated delta rule for consecutive tokens (Yang et al., 2024, arXiv 2412.06464, "chunkwise"): what the tokens of a chunk
// write solves one triangular system, and everything else is products of matrices. Values are lanes.
//
//   left[i][j] = e^(g_i - g_j), j <= i             what is left at token i of what token j wrote; g sums the logs of decays
//   c_i = beta_i (v_i - e^(g_i) S'k_i - sum over j < i of left[i][j] (k_i.k_j) c_j)
//   o_i = e^(g_i) S'q_i + sum over j <= i of left[i][j] (q_i.k_j) c_j
//   S <- e^(g_last) S + sum over j of e^(g_last - g_j) k_j c_j'
#pragma once
#include <cmath>

#include "operations.h"
#include "operations_prefill.h"

namespace oddrank {
namespace {

constexpr int CHUNK_ROWS = WIDTH == 16 ? 8 : 4;  // at a time: sums stay in registers

inline int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// out [rows, width] = keep * out (not read where that is 0) + w [rows, n] x [n, width]. w's numbers are row and column apart;
// width is whole panels.
inline void chunk_product(const float *w, int64_t row, int64_t column, int64_t rows, const float *x, int64_t x_row,
                          int64_t n, int64_t width, float keep, float *out, int64_t out_row) {
  const auto kept = [keep](const float *sum, int) { return keep == 0 ? zero() : set1(keep) * load(sum); };
  for (int64_t p = 0; p < width; p += PANEL) {
    int64_t r = 0;
    for (; r + CHUNK_ROWS <= rows; r += CHUNK_ROWS)
      panel_product<CHUNK_ROWS>(w + r * row, row, column, x + p, x_row, n, out + r * out_row + p, out_row, kept);
    for (; r < rows; r++)
      panel_product<1>(w + r * row, row, column, x + p, x_row, n, out + r * out_row + p, out_row, kept);
  }
}

// Sets row i of a triangle: numbers [0, end) times left, those from `seen` on to 0.
inline void leave(float *row, const float *sums, float at, float factor, int64_t seen, int64_t end) {
  for (int64_t j = 0; j < end; j += WIDTH) {
    const Vec left = exponential(set1(at) - load(sums + j)) * set1(factor);
    store(row + j, load(row + j) * left);
  }
  if (seen < end) std::memset(row + seen, 0, size_t(end - seen) * 4);
}

int64_t recur_chunk_scratch(const Chunk &a) {
  const int64_t lanes = whole(a.tokens, PANEL), width = whole(a.value_width, PANEL);
  return a.key_width * (lanes + width) + a.tokens * (a.key_width + 2 * lanes + 2 * width) + lanes;
}

void recur_chunk(const Chunk &a) {
  const int64_t n = a.tokens, keys = a.key_width, lanes = whole(n, PANEL), width = whole(a.value_width, PANEL);
  float *turned = a.scratch, *state = turned + keys * lanes, *scaled = state + keys * width;
  float *known = scaled + n * keys, *read = known + n * lanes;  // [n, lanes] triangles
  float *c = read + n * lanes, *o = c + n * width, *sums = o + n * width;
  const bool dense = width == a.value_width;
  if (dense)
    state = a.state;
  else
    for (int64_t i = 0; i < keys; i++) {
      std::memcpy(state + i * width, a.state + i * a.value_width, size_t(a.value_width) * 4);
      std::memset(state + i * width + a.value_width, 0, size_t(width - a.value_width) * 4);
    }
  float sum = 0;
  for (int64_t t = 0; t < n; t++) sums[t] = sum += a.decay[t];
  for (int64_t t = n; t < lanes; t++) sums[t] = sum;
  std::memset(turned, 0, size_t(keys * lanes) * 4);
  int64_t t = 0;
  for (; t + 8 <= n; t += 8) {
    int64_t i = 0;
    for (; i + 8 <= keys; i += 8)
      transpose8([&](int r) { return a.k + (t + r) * keys + i; }, turned + i * lanes + t, lanes);
    for (; i < keys; i++)
      for (int64_t s = t; s < t + 8; s++) turned[i * lanes + s] = a.k[s * keys + i];
  }
  for (; t < n; t++)
    for (int64_t i = 0; i < keys; i++) turned[i * lanes + t] = a.k[t * keys + i];

  for (int64_t i = 0; i < n; i += CHUNK_ROWS) {  // panels right of the diagonal are not computed
    const int64_t rows = n - i < CHUNK_ROWS ? n - i : CHUNK_ROWS, end = whole(i + rows, PANEL);
    chunk_product(a.k + i * keys, keys, 1, rows, turned, lanes, keys, end, 0, known + i * lanes, lanes);
    chunk_product(a.q + i * keys, keys, 1, rows, turned, lanes, keys, end, 0, read + i * lanes, lanes);
    for (int64_t r = i; r < i + rows; r++) {
      leave(known + r * lanes, sums, sums[r], -a.beta[r], r, end);
      leave(read + r * lanes, sums, sums[r], 1.0f, r + 1, end);
    }
  }

  const auto scale_rows = [&](const float *from, auto factor) {
    for (int64_t r = 0; r < n; r++) {
      const Vec by = set1(factor(r));
      each_vector(keys, [&](int64_t i, int64_t count) {
        store(scaled + r * keys + i, load(from + r * keys + i, count) * by, count);
      });
    }
  };
  std::memset(c, 0, size_t(n * width) * 4);
  for (int64_t r = 0; r < n; r++) {
    const Vec beta = set1(a.beta[r]);
    each_vector(a.value_width, [&](int64_t i, int64_t count) {
      store(c + r * width + i, load(a.v + r * a.v_row + i, count) * beta, count);
    });
  }
  scale_rows(a.k, [&](int64_t r) { return -a.beta[r] * ::expf(sums[r]); });
  chunk_product(scaled, keys, 1, n, state, width, keys, width, 1, c, width);
  scale_rows(a.q, [&](int64_t r) { return ::expf(sums[r]); });
  chunk_product(scaled, keys, 1, n, state, width, keys, width, 0, o, width);

  for (int64_t i = 0; i < n; i += CHUNK_ROWS) {  // the system, a block of rows after the other
    const int64_t rows = n - i < CHUNK_ROWS ? n - i : CHUNK_ROWS;
    if (i) chunk_product(known + i * lanes, lanes, 1, rows, c, width, i, width, 1, c + i * width, width);
    for (int64_t r = i + 1; r < i + rows; r++)
      for (int64_t v = 0; v < width; v += WIDTH) {
        Vec s = load(c + r * width + v);
        for (int64_t j = i; j < r; j++) s = fma(set1(known[r * lanes + j]), load(c + j * width + v), s);
        store(c + r * width + v, s);
      }
    chunk_product(read + i * lanes, lanes, 1, rows, c, width, i + rows, width, 1, o + i * width, width);
  }

  scale_rows(a.k, [&](int64_t r) { return ::expf(sums[n - 1] - sums[r]); });
  chunk_product(scaled, 1, keys, keys, c, width, n, width, ::expf(sums[n - 1]), state, width);
  if (!dense)
    for (int64_t i = 0; i < keys; i++)
      std::memcpy(a.state + i * a.value_width, state + i * width, size_t(a.value_width) * 4);
  for (int64_t r = 0; r < n; r++) std::memcpy(a.out + r * a.out_row, o + r * width, size_t(a.value_width) * 4);
}

}  // namespace
}  // namespace oddrank
