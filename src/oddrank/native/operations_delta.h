// The gated delta rule for one token (Yang et al., 2024, arXiv 2412.06464), with its short convolution.
#pragma once
#include "operations.h"
#include "vectors.h"

namespace oddrank {
namespace {

void convolve(const float *x, const float *taps, float *inputs, float *y, int64_t channels, int64_t kernel,
              int64_t begin, int64_t end) {
  each_vector(end - begin, [&](int64_t i, int64_t count) {
    const int64_t c = begin + i;
    const Vec now = load(x + c, count);
    Vec total = zero();
    for (int64_t j = 0; j + 1 < kernel; j++) {
      const Vec before = load(inputs + j * channels + c, count);
      if (j) store(inputs + (j - 1) * channels + c, before, count);
      total = fma(before, load(taps + j * channels + c, count), total);
    }
    if (kernel > 1) store(inputs + (kernel - 2) * channels + c, now, count);
    total = fma(now, load(taps + (kernel - 1) * channels + c, count), total);
    store(y + c, total * sigmoid(total), count);
  });
}

// Asks for the half of `count` rows of a state, of `width` numbers each, that the other pass does not ask for.
inline __attribute__((always_inline)) void prefetch_rows(const float *state, int64_t count, int64_t width, int64_t second) {
  if (!state) return;
  const uint8_t *at = reinterpret_cast<const uint8_t *>(state);
  for (int64_t i = 64 * second; i < 4 * count * width; i += 128) __builtin_prefetch(at + i, 1, 2);
}

// Sums over ROWS rows of the state, each times its number of k and of q, join known and read.
template <int ROWS>
inline void read_rows(const float *state, int64_t width, const float *k, const float *q, float *known, float *read) {
  Vec by_k[ROWS], by_q[ROWS];
  for (int r = 0; r < ROWS; r++) by_k[r] = set1(k[r]), by_q[r] = set1(q[r]);
  each_vector(width, [&](int64_t i, int64_t count) {
    Vec a = load(known + i, count), b = load(read + i, count);
    for (int r = 0; r < ROWS; r++) {
      const Vec s = load(state + r * width + i, count);
      a = fma(s, by_k[r], a);
      b = fma(s, by_q[r], b);
    }
    store(known + i, a, count);
    store(read + i, b, count);
  });
}

// S <- decay S + k c', c = beta (v - decay S'k), and the new S'q = decay S'q + (k.q) c: one pass over S in memory gives
// S'k and S'q, a second, which finds it in the cache, writes.
void recur(const Recur &r) {
  const int64_t width = r.value_width;
  float *known = r.scratch, *read = known + width;
  std::memset(known, 0, size_t(2 * width) * 4);
  int64_t row = 0;
  for (; row + 4 <= r.key_width; row += 4) {
    prefetch_rows(r.next ? r.next + row * width : nullptr, 4, width, 0);
    read_rows<4>(r.state + row * width, width, r.k + row, r.q + row, known, read);
  }
  for (; row < r.key_width; row++) read_rows<1>(r.state + row * width, width, r.k + row, r.q + row, known, read);
  Vec both = zero();
  each_vector(r.key_width, [&](int64_t i, int64_t count) { both = fma(load(r.k + i, count), load(r.q + i, count), both); });
  const Vec decay = set1(r.decay), beta = set1(r.beta), meet = set1(sum(both));
  each_vector(width, [&](int64_t i, int64_t count) {
    const Vec change = beta * (load(r.v + i, count) - decay * load(known + i, count));
    store(known + i, change, count);
    store(r.out + i, fma(meet, change, decay * load(read + i, count)), count);
  });
  for (row = 0; row < r.key_width; row++) {
    float *at = r.state + row * width;
    prefetch_rows(r.next ? r.next + row * width : nullptr, 1, width, 1);
    const Vec k = set1(r.k[row]);
    each_vector(width, [&](int64_t i, int64_t count) {
      store(at + i, fma(k, load(known + i, count), decay * load(at + i, count)), count);
    });
  }
}

}  // namespace
}  // namespace oddrank
