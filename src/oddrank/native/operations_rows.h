// Operations on single rows, over the vectors of one level (see vectors.h).
#pragma once
#include "operations.h"
#include "vectors.h"

namespace oddrank {
namespace {

// Two sums, so that additions do not wait for each other.
inline float sum_of_squares(const float *x, int64_t n) {
  Vec a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
    const Vec u = load(x + i), v = load(x + i + WIDTH);
    a = fma(u, u, a);
    b = fma(v, v, b);
  }
  each_vector(n - i, [&](int64_t j, int64_t count) {
    const Vec u = load(x + i + j, count);
    a = fma(u, u, a);
  });
  return sum(a + b);
}

void add(float *x, const float *y, int64_t n) {
  each_vector(n, [&](int64_t i, int64_t count) { store(x + i, load(x + i, count) + load(y + i, count), count); });
}

void norm(float *x, const float *delta, const float *weight, float *y, int64_t n, float eps) {
  if (delta) add(x, delta, n);
  const Vec factor = set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / float(n) + eps));
  each_vector(n, [&](int64_t i, int64_t count) {
    store(y + i, load(x + i, count) * factor * load(weight + i, count), count);
  });
}

void scale(float *y, int64_t n, float factor) {
  each_vector(n, [&](int64_t i, int64_t count) { store(y + i, load(y + i, count) * set1(factor), count); });
}

void unit(const float *x, float *y, int64_t n, float eps, float factor) {
  const Vec by = set1(factor / __builtin_sqrtf(sum_of_squares(x, n) + eps));
  each_vector(n, [&](int64_t i, int64_t count) { store(y + i, load(x + i, count) * by, count); });
}

void rotate(float *x, const float *cos, const float *sin, int64_t half) {
  each_vector(half, [&](int64_t i, int64_t count) {
    const Vec a = load(x + i, count), b = load(x + half + i, count);
    store(x + i, fma(b, load(sin + i, count), a * load(cos + i, count)), count);
    store(x + half + i, fma(a, load(sin + half + i, count), b * load(cos + half + i, count)), count);
  });
}

void to_number(const float *x, void *out, int64_t n, int32_t number) {
  uint16_t *words = static_cast<uint16_t *>(out);
  if (number == AS_F32) {
    std::memcpy(out, x, size_t(n) * 4);
  } else if (number == AS_BF16) {
    for (int64_t i = 0; i < n; i++) words[i] = float_to_bf16(x[i]);
  } else {
    for (int64_t i = 0; i < n; i++) words[i] = float_to_half(x[i]);
  }
}

inline Vec per_lane(Vec v, float (*f)(float)) {
  for (int i = 0; i < WIDTH; i++) v[i] = f(v[i]);
  return v;
}

inline float gelu(float x) { return 0.5f * x * (1.0f + __builtin_erff(x * 0x1.6a09e6p-1f)); }

// tanh(u) = 2 sigmoid(2u) - 1
inline Vec gelu_tanh(Vec x) {
  const Vec inner = x * fma(x * x, set1(0.044715f), set1(1.0f)) * set1(2 * 0.7978845608f);
  return x * sigmoid(inner);
}

template <class F>
inline void gated_by(const float *gate, const float *up, float *y, int64_t n, F f) {
  each_vector(n, [&](int64_t i, int64_t count) { store(y + i, f(load(gate + i, count)) * load(up + i, count), count); });
}

void gated(const float *gate, const float *up, float *y, int64_t n, int32_t activation) {
  switch (activation) {
    case SILU: return gated_by(gate, up, y, n, [](Vec g) { return g * sigmoid(g); });
    case GELU: return gated_by(gate, up, y, n, [](Vec g) { return per_lane(g, gelu); });
    case GELU_TANH: return gated_by(gate, up, y, n, gelu_tanh);
    case RELU: return gated_by(gate, up, y, n, [](Vec g) { return most(g, zero()); });
  }
}

void scale_by_sigmoid(float *y, const float *gate, int64_t n) {
  each_vector(n, [&](int64_t i, int64_t count) {
    store(y + i, load(y + i, count) * sigmoid(load(gate + i, count)), count);
  });
}

void gate_by_silu(float *y, const float *gate, int64_t n) {
  each_vector(n, [&](int64_t i, int64_t count) {
    const Vec g = load(gate + i, count);
    store(y + i, load(y + i, count) * (g * sigmoid(g)), count);
  });
}

float exponentials(const float *x, float *y, int64_t n, float most) {
  float total = 0;
  Vec sums = zero();
  each_vector(n, [&](int64_t i, int64_t count) {
    const Vec e = exponential(load(x + i, count) - set1(most));
    store(y + i, e, count);
    sums += load(y + i, count);
  });
  total = sum(sums);
  return total;
}

// Numbers after the last are `behind`.
inline Vec load_or(const float *p, int64_t count, float behind) {
  if (count >= WIDTH) return load(p);
  float all[WIDTH];
  for (int i = 0; i < WIDTH; i++) all[i] = i < count ? p[i] : behind;
  return load(all);
}

void run_maxima(const float *x, int64_t n, float *out) {
  for (; n > 0; n -= RUN, x += RUN) {
    Vec high = load_or(x, n, x[0]), sums = high - high;  // NaN or infinity less itself is NaN
    for (int64_t i = WIDTH; i < RUN && i < n; i += WIDTH) {
      const Vec v = load_or(x + i, n - i, x[0]);
      high = most(high, v);
      sums += v - v;
    }
    float high_of_all = largest(high);
    if (sum(sums) != 0.0f)  // rare: which of the two?
      for (int64_t i = 0; i < RUN && i < n; i++)
        if (x[i] != x[i]) high_of_all = x[i];
    *out++ = high_of_all;
  }
}

void run_weights(const float *x, int64_t n, float most, float by, float *out) {
  for (; n > 0; n -= RUN, x += RUN) {
    Vec sums = zero();
    for (int64_t i = 0; i < RUN && i < n; i += WIDTH)
      sums += exponential((load_or(x + i, n - i, -__builtin_inff()) - set1(most)) * set1(by));
    *out++ = sum(sums);
  }
}

// `N` rows of x at a time: a weight that was read serves all of them.
template <int N>
inline void row_product(const float *row, int64_t k, const float *x, int64_t stride, float *sums) {
  Vec a[N], b[N];
  for (int j = 0; j < N; j++) a[j] = b[j] = zero();
  int64_t i = 0;
  for (; i + 2 * WIDTH <= k; i += 2 * WIDTH) {
    const Vec u = load(row + i), v = load(row + i + WIDTH);
    for (int j = 0; j < N; j++) {
      a[j] = fma(u, load(x + j * stride + i), a[j]);
      b[j] = fma(v, load(x + j * stride + i + WIDTH), b[j]);
    }
  }
  each_vector(k - i, [&](int64_t at, int64_t count) {
    const Vec u = load(row + i + at, count);
    for (int j = 0; j < N; j++) a[j] = fma(u, load(x + j * stride + i + at, count), a[j]);
  });
  for (int j = 0; j < N; j++) sums[j] = sum(a[j] + b[j]);
}

void products(const float *a, int64_t k, const float *x, int64_t m, int64_t x_stride, int64_t begin, int64_t end,
              const float *bias, float *y, int64_t y_stride) {
  for (int64_t row = begin; row < end; row++) {
    const float *weights = a + row * k;
    const float added = bias ? bias[row] : 0.0f;
    int64_t b = 0;
    float sums[4];
    for (; b + 4 <= m; b += 4) {
      row_product<4>(weights, k, x + b * x_stride, x_stride, sums);
      for (int j = 0; j < 4; j++) y[(b + j) * y_stride + row] = sums[j] + added;
    }
    for (; b < m; b++) {
      row_product<1>(weights, k, x + b * x_stride, x_stride, sums);
      y[b * y_stride + row] = sums[0] + added;
    }
  }
}

}  // namespace
}  // namespace oddrank
