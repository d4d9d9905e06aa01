// Attention of a block of a prompt's tokens: queries are lanes, so that nothing of a softmax crosses lanes. A tile of keys
// is multiplied by all queries of the block before the next one is read; then its values, by the weights that its scores
// have become (one pass with running maxima: Milakov and Gimelshein, 2018, arXiv 1805.02867).
#pragma once
#include "operations.h"
#include "operations_attention.h"
#include "transpose.h"
#include "vectors.h"

namespace oddrank {
namespace {

constexpr int PANEL = 2 * WIDTH;  // queries of one head, that many consecutive tokens
constexpr int TILE_KEYS = 48;     // tiles end at multiples of it: sums do not depend on how a prompt is cut
constexpr int SCORE_ROWS = WIDTH == 16 ? 12 : WIDTH == 8 ? 6 : 4;  // keys at a time: sums stay in registers
constexpr int VALUE_ROWS = WIDTH == 16 ? 8 : 4;                    // channels at a time
static_assert(TILE_KEYS % SCORE_ROWS == 0, "a tile is whole steps");

// out [ROWS, PANEL] = start(out's first of a vector, which vector) + w [ROWS, columns] x [columns, PANEL], w's numbers being
// row and column apart, rows of x and out x_row and out_row.
template <int ROWS, class Start>
inline __attribute__((always_inline)) void panel_product(const float *w, int64_t row, int64_t column, const float *x,
                                                         int64_t x_row, int64_t columns, float *out, int64_t out_row,
                                                         Start start) {
  Vec s[ROWS][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 2; v++) s[r][v] = start(out + r * out_row + v * WIDTH, v);
  for (int64_t c = 0; c < columns; c++) {
    const Vec a = load(x + c * x_row), b = load(x + c * x_row + WIDTH);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const Vec one = set1(w[r * row + c * column]);
      s[r][0] = fma(one, a, s[r][0]);
      s[r][1] = fma(one, b, s[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < 2; v++) store(out + r * out_row + v * WIDTH, s[r][v]);
}

inline Vec from_zero(const float *, int) { return zero(); }

int64_t block_panels(const Block &b) { return b.count * ((b.tokens + PANEL - 1) / PANEL); }

int64_t attend_block_scratch(const Block &b) {
  const int64_t dim = b.pages->dim, panels = block_panels(b);
  return panels * PANEL * (2 * dim + 3) + TILE_KEYS * (PANEL + 2 * dim) + PANEL;
}

// Rows [from, from + TILE_KEYS) of a head's keys or values as fp32, zeros behind `keys` of them.
inline const float *tile_rows(const Block &b, void *all, int64_t from, int64_t keys, float *own) {
  const Pages &pages = *b.pages;
  const int64_t dim = pages.dim;
  if (pages.number == AS_F32 && keys == TILE_KEYS &&
      (!pages.table || from / pages.page_size == (from + keys - 1) / pages.page_size))
    return reinterpret_cast<const float *>(row_of(pages, all, b.slot, b.head, from));
  for (int64_t at = from; at < from + keys;) {
    const int64_t page_end = pages.table ? (at / pages.page_size + 1) * pages.page_size : from + keys;
    const int64_t some = (page_end < from + keys ? page_end : from + keys) - at;
    widen(row_of(pages, all, b.slot, b.head, at), pages.number, some, dim, dim, own + (at - from) * dim);
    at += some;
  }
  std::memset(own + keys * dim, 0, size_t((TILE_KEYS - keys) * dim) * 4);
  return own;
}

// Keys that a query does not see score minus infinity. position: of each query.
inline void hide(float *scores, int64_t from, int64_t keys, const float *position, int64_t window) {
  const Vec never = set1(-__builtin_inff());
  for (int64_t j = 0; j < keys; j++)
    for (int v = 0; v < PANEL; v += WIDTH) {
      const Vec at = load(position + v), key = set1(float(from + j)), score = load(scores + j * PANEL + v);
      Vec seen = key <= at ? score : never;
      if (window) seen = key > at - set1(float(window)) ? seen : never;
      store(scores + j * PANEL + v, seen);
    }
}

// Scores become weights; gives what earlier sums shrink by.
inline void weigh_panel(float *scores, int64_t keys, float *most_so_far, float *total, float *shrink) {
  for (int v = 0; v < PANEL; v += WIDTH) {
    const Vec before = load(most_so_far + v);
    Vec now = before, sums = zero();
    for (int64_t j = 0; j < keys; j++) now = most(now, load(scores + j * PANEL + v));
    // Where all scores so far are minus infinity: no weight, and no infinity minus infinity.
    const Vec from = now == set1(-__builtin_inff()) ? zero() : now;
    for (int64_t j = 0; j < keys; j++) {
      const Vec e = exponential(load(scores + j * PANEL + v) - from);
      store(scores + j * PANEL + v, e);
      sums += e;
    }
    const Vec less = exponential(before - from);
    store(shrink + v, less);
    store(most_so_far + v, now);
    store(total + v, fma(load(total + v), less, sums));
  }
}

void attend_block(const Block &b) {
  const int64_t dim = b.pages->dim, each = (b.tokens + PANEL - 1) / PANEL, panels = block_panels(b), lanes = panels * PANEL;
  float *q = b.scratch, *acc = q + lanes * dim, *most_so_far = acc + lanes * dim, *totals = most_so_far + lanes;
  float *positions = totals + lanes, *scores = positions + lanes, *own_k = scores + TILE_KEYS * PANEL;
  float *own_v = own_k + TILE_KEYS * dim, *shrink = own_v + TILE_KEYS * dim;
  std::memset(q, 0, size_t(2 * lanes * dim) * 4);
  for (int64_t p = 0; p < panels; p++) {
    const int64_t head = b.queries[p / each], first = p % each * PANEL;
    const int64_t count = b.tokens - first < PANEL ? b.tokens - first : PANEL;
    const float *from = b.q + first * b.q_row + head * b.q_stride;
    float *to = q + p * PANEL * dim;
    for (int64_t i = 0; i < dim; i++)
      for (int64_t t = 0; t < count; t++) to[i * PANEL + t] = from[t * b.q_row + i] * b.scale;
    for (int64_t t = 0; t < PANEL; t++) {
      positions[p * PANEL + t] = float(b.past + first + t);
      most_so_far[p * PANEL + t] = b.sinks ? b.sinks[head] : -__builtin_inff();
      totals[p * PANEL + t] = b.sinks ? 1.0f : 0.0f;
    }
  }
  const int64_t end = b.past + b.tokens, oldest = b.window && b.past + 1 > b.window ? b.past + 1 - b.window : 0;
  int64_t next;
  for (int64_t from = oldest; from < end; from = next) {
    next = (from / TILE_KEYS + 1) * TILE_KEYS;
    if (next > end) next = end;
    const int64_t keys = next - from;
    const float *k = tile_rows(b, b.pages->keys, from, keys, own_k);
    const float *v = tile_rows(b, b.pages->values, from, keys, own_v);
    for (int64_t p = 0; p < panels; p++) {
      const int64_t least = b.past + p % each * PANEL, last = least + PANEL - 1;
      if (from > last) continue;
      const float *x = q + p * PANEL * dim;
      float *sums = acc + p * PANEL * dim;
      for (int64_t j = 0; j < keys; j += SCORE_ROWS)
        panel_product<SCORE_ROWS>(k + j * dim, dim, 1, x, PANEL, dim, scores + j * PANEL, PANEL, from_zero);
      if (from + keys - 1 > least || (b.window && from <= last - b.window))
        hide(scores, from, keys, positions + p * PANEL, b.window);
      weigh_panel(scores, keys, most_so_far + p * PANEL, totals + p * PANEL, shrink);
      const auto shrunk = [shrink](const float *sum, int half) { return load(sum) * load(shrink + half * WIDTH); };
      int64_t i = 0;
      for (; i + VALUE_ROWS <= dim; i += VALUE_ROWS)
        panel_product<VALUE_ROWS>(v + i, 1, dim, scores, PANEL, keys, sums + i * PANEL, PANEL, shrunk);
      for (; i < dim; i++) panel_product<1>(v + i, 1, dim, scores, PANEL, keys, sums + i * PANEL, PANEL, shrunk);
    }
  }
  for (int64_t p = 0; p < panels; p++) {
    const int64_t head = b.queries[p / each], first = p % each * PANEL;
    const int64_t count = b.tokens - first < PANEL ? b.tokens - first : PANEL;
    float *sums = acc + p * PANEL * dim, *to = b.out + first * b.out_row + head * dim;
    for (int v = 0; v < PANEL; v += WIDTH) {
      const Vec share = set1(1.0f) / load(totals + p * PANEL + v);
      for (int64_t i = 0; i < dim; i++) store(sums + i * PANEL + v, load(sums + i * PANEL + v) * share);
    }
    int64_t t = 0;
    for (; t + 8 <= count; t += 8) {
      int64_t i = 0;
      for (; i + 8 <= dim; i += 8)
        transpose8([&](int c) { return sums + (i + c) * PANEL + t; }, to + t * b.out_row + i, b.out_row);
      for (; i < dim; i++)
        for (int64_t s = t; s < t + 8; s++) to[s * b.out_row + i] = sums[i * PANEL + s];
    }
    for (; t < count; t++)
      for (int64_t i = 0; i < dim; i++) to[t * b.out_row + i] = sums[i * PANEL + t];
  }
}

}  // namespace
}  // namespace oddrank
