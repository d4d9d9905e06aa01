// Attention of one KV head's queries over a run of keys, in one pass: scores of a block of keys, then their weights
// against the largest score so far, then the weighted values (Milakov and Gimelshein, 2018, arXiv 1805.02867).
#pragma once
#include "operations.h"
#include "vectors.h"

namespace oddrank {
namespace {

constexpr int KEYS = 32;   // of a block
constexpr int ACROSS = 3;  // queries at a time: their sums with four keys, and the operands, are in registers

inline int64_t padded(int64_t dim) { return (dim + WIDTH - 1) / WIDTH * WIDTH; }

int64_t attend_scratch(int64_t dim, int64_t count) { return padded(dim) * (2 * count + KEYS) + count * (KEYS + 3); }

// Numbers [rows, dim] of the cache as fp32 rows of `stride`, zeros behind each.
inline void widen(const void *from, int32_t number, int64_t rows, int64_t dim, int64_t stride, float *to) {
  for (int64_t r = 0; r < rows; r++, to += stride) {
    const uint16_t *words = static_cast<const uint16_t *>(from) + r * dim;
    int64_t i = 0;
    if (number == AS_F32) {
      const float *row = static_cast<const float *>(from) + r * dim;
      for (; i + WIDTH <= dim; i += WIDTH) store(to + i, load(row + i));
      for (; i < dim; i++) to[i] = row[i];
    } else if (number == AS_BF16) {
      for (; i + WIDTH <= dim; i += WIDTH) store(to + i, from_bf16(words + i));
      for (; i < dim; i++) to[i] = bf16_to_float(words[i]);
    } else {
      for (; i + WIDTH <= dim; i += WIDTH) store(to + i, from_half(words + i));
      for (; i < dim; i++) to[i] = half_to_float(words[i]);
    }
    for (; i < stride; i++) to[i] = 0;
  }
}

// Scores of N queries with J keys: s[n * KEYS + j] = q[n] . k[j]
template <int N, int J>
inline void scores(const float *q, const float *k, int64_t stride, float *s) {
  Vec sums[N][J];
  for (auto &row : sums)
    for (auto &one : row) one = zero();
  for (int64_t i = 0; i < stride; i += WIDTH) {
    Vec at[N];
    for (int n = 0; n < N; n++) at[n] = load(q + n * stride + i);
    for (int j = 0; j < J; j++) {
      const Vec key = load(k + j * stride + i);
      for (int n = 0; n < N; n++) sums[n][j] = fma(at[n], key, sums[n][j]);
    }
  }
  for (int n = 0; n < N; n++) {
    if constexpr (J == 4) {
      sum_four(sums[n][0], sums[n][1], sums[n][2], sums[n][3], s + n * KEYS);
    } else {
      for (int j = 0; j < J; j++) s[n * KEYS + j] = sum(sums[n][j]);
    }
  }
}

template <int N>
inline void block_scores(const float *q, const float *k, int64_t stride, int64_t keys, float *s) {
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) scores<N, 4>(q, k + j * stride, stride, s + j);
  for (; j < keys; j++) scores<N, 1>(q, k + j * stride, stride, s + j);
}

// acc[n] = acc[n] * shrink[n] + sum over j of weights[n * KEYS + j] * v[j], over V vectors of columns.
template <int N, int V>
inline void values(const float *weights, const float *v, int64_t stride, int64_t keys, const float *shrink, float *acc) {
  Vec sums[N][V];
  for (int n = 0; n < N; n++)
    for (int u = 0; u < V; u++) sums[n][u] = load(acc + n * stride + u * WIDTH) * set1(shrink[n]);
  for (int64_t j = 0; j < keys; j++) {
    Vec w[N];
    for (int n = 0; n < N; n++) w[n] = set1(weights[n * KEYS + j]);
    for (int u = 0; u < V; u++) {
      const Vec at = load(v + j * stride + u * WIDTH);
      for (int n = 0; n < N; n++) sums[n][u] = fma(w[n], at, sums[n][u]);
    }
  }
  for (int n = 0; n < N; n++)
    for (int u = 0; u < V; u++) store(acc + n * stride + u * WIDTH, sums[n][u]);
}

template <int N>
inline void block_values(const float *weights, const float *v, int64_t stride, int64_t keys, const float *shrink,
                         float *acc) {
  int64_t i = 0;
  for (; i + 4 * WIDTH <= stride; i += 4 * WIDTH) values<N, 4>(weights, v + i, stride, keys, shrink, acc + i);
  for (; i < stride; i += WIDTH) values<N, 1>(weights, v + i, stride, keys, shrink, acc + i);
}

// Weights of a block's scores, in their place. `largest` and `total` of the query go on; gives what to shrink earlier
// sums by.
inline float weigh(float *s, int64_t keys, float &most_so_far, float &total) {
  Vec high = set1(most_so_far);
  for (int64_t j = keys; j % WIDTH; j++) s[j] = -__builtin_inff();  // a block has room for whole vectors
  for (int64_t j = 0; j < keys; j += WIDTH) high = most(high, load(s + j));
  const float now = largest(high);
  // All scores so far are minus infinity: no weight, and no infinity minus infinity.
  const float from = now == -__builtin_inff() ? 0.0f : now;
  Vec sums = zero();
  for (int64_t j = 0; j < keys; j += WIDTH) {
    const Vec e = exponential(load(s + j) - set1(from));
    store(s + j, e);
    sums += e;
  }
  const float shrink = exponential(set1(most_so_far - from))[0];
  most_so_far = now;
  total = total * shrink + sum(sums);
  return shrink;
}

void attend(const Attend &a) {
  const Pages &pages = *a.pages;
  const int64_t dim = pages.dim, stride = padded(dim), count = a.count;
  const bool as_it_is = pages.number == AS_F32 && stride == dim;
  float *q = a.scratch, *acc = q + count * stride, *wide = acc + count * stride, *s = wide + KEYS * stride;
  float *largest_yet = s + count * KEYS, *totals = largest_yet + count, *shrink = totals + count;
  for (int64_t n = 0; n < count; n++) {
    const float *from = a.q + a.queries[n] * a.q_stride;
    for (int64_t i = 0; i < stride; i++) {
      q[n * stride + i] = i < dim ? from[i] * a.scale : 0.0f;
      acc[n * stride + i] = 0;
    }
    largest_yet[n] = -__builtin_inff();
    totals[n] = 0;
  }
  for (int64_t at = a.begin; at < a.end;) {
    const int64_t page_end = pages.table ? (at / pages.page_size + 1) * pages.page_size : a.end;
    int64_t keys = a.end - at < KEYS ? a.end - at : KEYS;
    if (page_end - at < keys) keys = page_end - at;
    const uint8_t *k_rows = row_of(pages, pages.keys, a.slot, a.head, at);
    const uint8_t *v_rows = row_of(pages, pages.values, a.slot, a.head, at);
    const float *k = reinterpret_cast<const float *>(k_rows), *v = reinterpret_cast<const float *>(v_rows);
    if (!as_it_is) {
      widen(k_rows, pages.number, keys, dim, stride, wide);
      k = wide;
    }
    int64_t n = 0;
    for (; n + ACROSS <= count; n += ACROSS) block_scores<ACROSS>(q + n * stride, k, stride, keys, s + n * KEYS);
    if (count - n == 2) block_scores<2>(q + n * stride, k, stride, keys, s + n * KEYS);
    if (count - n == 1) block_scores<1>(q + n * stride, k, stride, keys, s + n * KEYS);
    for (n = 0; n < count; n++) shrink[n] = weigh(s + n * KEYS, keys, largest_yet[n], totals[n]);
    if (!as_it_is) {
      widen(v_rows, pages.number, keys, dim, stride, wide);
      v = wide;
    }
    for (n = 0; n + ACROSS <= count; n += ACROSS)
      block_values<ACROSS>(s + n * KEYS, v, stride, keys, shrink + n, acc + n * stride);
    if (count - n == 2) block_values<2>(s + n * KEYS, v, stride, keys, shrink + n, acc + n * stride);
    if (count - n == 1) block_values<1>(s + n * KEYS, v, stride, keys, shrink + n, acc + n * stride);
    at += keys;
  }
  for (int64_t n = 0; n < count; n++) {
    float *out = a.out + n * (dim + 2);
    std::memcpy(out, acc + n * stride, size_t(dim) * 4);
    out[dim] = largest_yet[n];
    out[dim + 1] = totals[n];
  }
}

}  // namespace
}  // namespace oddrank
