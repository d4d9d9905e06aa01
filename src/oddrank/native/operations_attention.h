// Attention of one KV head's queries over a run of keys, in one pass: scores of a block of keys, then their weights
// against the largest score so far, then the weighted values (Milakov and Gimelshein, 2018, arXiv 1805.02867).
//
// Keys and values are decoded as they are read, a pair of vectors at a time, in which numbers may lie in another order:
// queries are arranged likewise, and sums are put back in order at the end. Heads that are not whole pairs are widened to
// fp32 first.
#pragma once
#include "operations.h"
#include "vectors.h"

namespace oddrank {
namespace {

constexpr int KEYS = 64;           // of a block
constexpr int PAIR = 2 * WIDTH;    // numbers of a pair of vectors
constexpr int AHEAD = 2048;        // bytes: about what memory takes to answer

// Asks for `bytes` behind p, and for those that lie AHEAD of q.
inline __attribute__((always_inline)) void prefetch(const void *p, const void *q, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const uint8_t *>(p) + i, 0, 2);
    __builtin_prefetch(static_cast<const uint8_t *>(q) + AHEAD + i);
  }
}

struct Floats {
  typedef float Number;
  static int column(int i) { return i; }
  static inline void pair(const float *p, Vec &a, Vec &b) { a = load(p), b = load(p + WIDTH); }
};

struct Halves {
  typedef uint16_t Number;
  static int column(int i) { return i; }
  static inline void pair(const uint16_t *p, Vec &a, Vec &b) { a = from_half(p), b = from_half(p + WIDTH); }
};

// Two numbers are a word, whose upper half is one of them as fp32 but for the bits of the other.
struct Bf16s {
  typedef uint16_t Number;
  static int column(int i) { return i < WIDTH ? 2 * i + !LITTLE : 2 * (i - WIDTH) + LITTLE; }
  static inline void pair(const uint16_t *p, Vec &a, Vec &b) {
    Ints words;
    std::memcpy(&words, p, sizeof words);
    a = Vec(words << 16);
    b = Vec(words & int32_t(0xffff0000));
  }
};

// PAIR numbers of a row as pairs of vectors have them, times `by`; and back.
template <class D>
inline void arrange(const float *from, float by, float *to) {
  for (int i = 0; i < WIDTH; i++) to[i] = from[D::column(i)] * by;
  for (int i = WIDTH; i < PAIR; i++) to[i] = from[D::column(i)] * by;
}
template <class D>
inline void restore(const float *from, float *to) {
  for (int i = 0; i < WIDTH; i++) to[D::column(i)] = from[i];
  for (int i = WIDTH; i < PAIR; i++) to[D::column(i)] = from[i];
}

// Calls f(i, count) for each PAIR of n numbers: count is PAIR, and what is left for the last.
template <class F>
inline void each_pair(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += PAIR) f(i, n - i < PAIR ? n - i : int64_t(PAIR));
}

inline int64_t padded(int64_t dim) { return (dim + PAIR - 1) / PAIR * PAIR; }

int64_t attend_scratch(int64_t dim, int64_t count) { return padded(dim) * (2 * count + KEYS) + count * (KEYS + 3); }

// Numbers [rows, dim] of the cache as fp32 rows of `stride`, zeros behind each.
inline void widen(const void *from, int32_t number, int64_t rows, int64_t dim, int64_t stride, float *to) {
  for (int64_t r = 0; r < rows; r++, to += stride) {
    const uint16_t *words = static_cast<const uint16_t *>(from) + r * dim;
    const float *floats = static_cast<const float *>(from) + r * dim;
    for (int64_t i = 0; i < stride; i++) {
      if (i >= dim) to[i] = 0;
      else if (number == AS_F32) to[i] = floats[i];
      else to[i] = number == AS_BF16 ? bf16_to_float(words[i]) : half_to_float(words[i]);
    }
  }
}

// Scores of N queries with J keys, into s[n * KEYS + j].
template <class D, int N, int J>
inline void scores(const float *q, const typename D::Number *k, int64_t stride, float *s) {
  Vec sums[N * J];
  for (auto &one : sums) one = zero();
  for (int64_t i = 0; i < stride; i += PAIR) {
    for (int j = 0; j < J; j++) {
      Vec a, b;
      D::pair(k + j * stride + i, a, b);
      for (int n = 0; n < N; n++) sums[n * J + j] = fma(load(q + n * stride + i), a, sums[n * J + j]);
      for (int n = 0; n < N; n++) sums[n * J + j] = fma(load(q + n * stride + i + WIDTH), b, sums[n * J + j]);
    }
  }
  if constexpr (N * J % 4 == 0) {
    float found[N * J];
    for (int i = 0; i < N * J; i += 4) sum_four(sums[i], sums[i + 1], sums[i + 2], sums[i + 3], found + i);
    for (int n = 0; n < N; n++)
      for (int j = 0; j < J; j++) s[n * KEYS + j] = found[n * J + j];
  } else {
    for (int n = 0; n < N; n++)
      for (int j = 0; j < J; j++) s[n * KEYS + j] = sum(sums[n * J + j]);
  }
}

// v: the values that belong to the keys and will be needed next; null where they are on their way.
template <class D, int N>
inline void block_scores(const float *q, const typename D::Number *k, const typename D::Number *v, int64_t stride,
                         int64_t keys, float *s) {
  constexpr int J = N == 1 ? 8 : N == 4 ? 2 : 4;  // 8 to 12 sums: as many as wait for each other, and fit in registers
  int64_t j = 0;
  for (; j + J <= keys; j += J) {
    if (v) prefetch(v + j * stride, k + j * stride, J * stride * int64_t(sizeof(*k)));
    scores<D, N, J>(q, k + j * stride, stride, s + j);
  }
  for (; j < keys; j++) scores<D, N, 1>(q, k + j * stride, stride, s + j);
}

// acc[n] = acc[n] * shrink[n] + sum over j of weights[n * KEYS + j] * v[j], over V pairs of columns.
template <class D, int N, int V>
inline void values(const float *weights, const typename D::Number *v, int64_t stride, int64_t keys, const float *shrink,
                   float *acc) {
  Vec sums[N][2 * V];
  for (int n = 0; n < N; n++)
    for (int u = 0; u < 2 * V; u++) sums[n][u] = load(acc + n * stride + u * WIDTH) * set1(shrink[n]);
  for (int64_t j = 0; j < keys; j++) {
    Vec w[N];
    for (int n = 0; n < N; n++) w[n] = set1(weights[n * KEYS + j]);
    for (int u = 0; u < V; u++) {
      Vec a, b;
      D::pair(v + j * stride + u * PAIR, a, b);
      for (int n = 0; n < N; n++) {
        sums[n][2 * u] = fma(w[n], a, sums[n][2 * u]);
        sums[n][2 * u + 1] = fma(w[n], b, sums[n][2 * u + 1]);
      }
    }
  }
  for (int n = 0; n < N; n++)
    for (int u = 0; u < 2 * V; u++) store(acc + n * stride + u * WIDTH, sums[n][u]);
}

template <class D, int N>
inline void block_values(const float *weights, const typename D::Number *v, int64_t stride, int64_t keys,
                         const float *shrink, float *acc) {
  constexpr int V = N == 1 ? 4 : N == 4 ? 1 : 2;
  int64_t i = 0;
  for (; i + V * PAIR <= stride; i += V * PAIR) values<D, N, V>(weights, v + i, stride, keys, shrink, acc + i);
  for (; i < stride; i += PAIR) values<D, N, 1>(weights, v + i, stride, keys, shrink, acc + i);
}

// Weights of a block's scores, in their place. `largest` and `total` of the query go on; gives what to shrink earlier
// sums by.
inline float weigh(float *s, int64_t keys, float &most_so_far, float &total) {
  for (int64_t j = keys; j % WIDTH; j++) s[j] = -__builtin_inff();  // a block has room for whole vectors
  Vec high = load(s);
  for (int64_t j = WIDTH; j < keys; j += WIDTH) high = most(high, load(s + j));
  const float here = largest(high), before = most_so_far, now = here > before ? here : before;
  // All scores so far are minus infinity: no weight, and no infinity minus infinity.
  const float from = now == -__builtin_inff() ? 0.0f : now;
  Vec sums = zero();
  for (int64_t j = 0; j < keys; j += WIDTH) {
    const Vec e = exponential(load(s + j) - set1(from));
    store(s + j, e);
    sums += e;
  }
  const float shrink = now == before ? 1.0f : exponential(set1(before - from))[0];
  most_so_far = now;
  total = total * shrink + sum(sums);
  return shrink;
}

// Calls f(Count<N>(), first) for the queries, N at a time: three, or four where one would be left alone.
template <class F>
inline void in_groups(int64_t count, F f) {
  int64_t n = 0;
  while (count - n == 3 || count - n > 4) f(Count<3>(), n), n += 3;
  if (count - n == 4) f(Count<4>(), n), n += 4;
  if (count - n == 2) f(Count<2>(), n);
  if (count - n == 1) f(Count<1>(), n);
}

template <class D>
inline void attend_as(const Attend &a, bool widened) {
  typedef typename D::Number Number;
  const Pages &pages = *a.pages;
  const int64_t dim = pages.dim, stride = padded(dim), count = a.count;
  float *q = a.scratch, *acc = q + count * stride, *wide = acc + count * stride, *s = wide + KEYS * stride;
  float *largest_yet = s + count * KEYS, *totals = largest_yet + count, *shrink = totals + count;
  for (int64_t n = 0; n < count; n++) {
    const float *from = a.q + a.queries[n] * a.q_stride;
    each_pair(dim, [&](int64_t i, int64_t some) {
      float part[PAIR] = {};
      if (some < PAIR) std::memcpy(part, from + i, size_t(some) * 4);
      arrange<D>(some < PAIR ? part : from + i, a.scale, q + n * stride + i);
    });
    std::memset(acc + n * stride, 0, size_t(stride) * 4);
    largest_yet[n] = -__builtin_inff();
    totals[n] = 0;
  }
  for (int64_t at = a.begin; at < a.end; at += KEYS) {
    const int64_t keys = a.end - at < KEYS ? a.end - at : KEYS;
    // Calls f(first key, keys) for what of the block lies in one run.
    const auto each_run = [&](auto f) {
      for (int64_t first = 0, run; first < keys; first += run) {
        run = pages.table ? pages.page_size - (at + first) % pages.page_size : keys;
        if (run > keys - first) run = keys - first;
        f(first, run);
      }
    };
    const auto rows = [&](void *all, int64_t first, int64_t run) {
      const void *found = row_of(pages, all, a.slot, a.head, at + first);
      if (!widened) return static_cast<const Number *>(found);
      widen(found, pages.number, run, dim, stride, wide);
      return reinterpret_cast<const Number *>(wide);
    };
    each_run([&](int64_t first, int64_t run) {
      const Number *k = rows(pages.keys, first, run), *next = widened ? nullptr : rows(pages.values, first, run);
      in_groups(count, [&](auto group, int64_t n) {
        block_scores<D, decltype(group)::value>(q + n * stride, k, n ? nullptr : next, stride, run, s + n * KEYS + first);
      });
    });
    for (int64_t n = 0; n < count; n++) shrink[n] = weigh(s + n * KEYS, keys, largest_yet[n], totals[n]);
    each_run([&](int64_t first, int64_t run) {
      const Number *v = rows(pages.values, first, run);
      in_groups(count, [&](auto group, int64_t n) {
        block_values<D, decltype(group)::value>(s + n * KEYS + first, v, stride, run, shrink + n, acc + n * stride);
      });
      for (int64_t n = 0; n < count; n++) shrink[n] = 1;
    });
  }
  for (int64_t n = 0; n < count; n++) {
    float *out = a.out + n * (dim + 2);
    each_pair(dim, [&](int64_t i, int64_t some) {
      float part[PAIR];
      restore<D>(acc + n * stride + i, part);
      std::memcpy(out + i, part, size_t(some) * 4);
    });
    out[dim] = largest_yet[n];
    out[dim + 1] = totals[n];
  }
}

void attend(const Attend &a) {
  if (a.pages->dim % PAIR) return attend_as<Floats>(a, true);
  switch (a.pages->number) {
    case AS_BF16: return attend_as<Bf16s>(a, false);
    case AS_F16: return attend_as<Halves>(a, false);
    case AS_F32: return attend_as<Floats>(a, false);
  }
}

}  // namespace
}  // namespace oddrank
