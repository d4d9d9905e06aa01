// The routed experts of a batch: down(silu(gate x) * up x) of every expert that some token chose, times the token's weight
// for it, summed in the order of the experts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "scratch.h"

namespace oddrank {
namespace {

constexpr int64_t PIECE = 64 << 10;  // bytes of weights in a piece of work

// The tokens that chose an expert are pairs [begin, end).
struct Routed {
  int64_t expert, begin, end;
};

struct Piece {
  int32_t routed;
  int64_t begin, end;  // rows
};

struct Layer {
  const Level *level;
  const Matrix *gate, *up, *down;  // one an expert
  int64_t up_row;                  // the row of `up` that belongs to row 0 of `gate`
  int64_t width, hidden;
  std::vector<Routed> routed;
  std::vector<int64_t> tokens;  // of each pair
  std::vector<float> weights;
  std::vector<Piece> pieces;
  const float *x;  // arranged, [tokens, x_width]
  float *gates, *ups, *inner, *terms;
  int64_t x_width, inner_width;

  void cut(int64_t rows, int64_t row_bytes) {
    pieces.clear();
    const int64_t step = std::max<int64_t>(4, PIECE / std::max<int64_t>(1, row_bytes) / 4 * 4);
    for (size_t r = 0; r < routed.size(); r++)
      for (int64_t begin = 0; begin < rows; begin += step)
        pieces.push_back({int32_t(r), begin, std::min(rows, begin + step)});
  }
};

float silu(float v) { return v / (1.0f + std::exp(-v)); }

thread_local Scratch own_x;

void gate_up(void *context, int64_t i) {
  const Layer &l = *static_cast<Layer *>(context);
  const Piece &p = l.pieces[size_t(i)];
  const Routed &r = l.routed[size_t(p.routed)];
  const int64_t m = r.end - r.begin;
  const float *x = l.x + l.tokens[size_t(r.begin)] * l.x_width;
  if (m > 1) {
    float *gathered = own_x.floats(m * l.x_width);
    for (int64_t b = 0; b < m; b++)
      std::memcpy(gathered + b * l.x_width, l.x + l.tokens[size_t(r.begin + b)] * l.x_width, size_t(l.x_width) * 4);
    x = gathered;
  }
  float *gates = l.gates + r.begin * l.width, *ups = l.ups + r.begin * l.width;
  l.level->multiply(l.gate[r.expert], x, m, p.begin, p.end, gates, l.width);
  l.level->multiply(l.up[r.expert], x, m, p.begin + l.up_row, p.end + l.up_row, ups - l.up_row, l.width);
  for (int64_t b = 0; b < m; b++)
    for (int64_t row = p.begin; row < p.end; row++) {
      float &g = gates[b * l.width + row];
      g = silu(g) * ups[b * l.width + row];
    }
}

void arrange_inner(void *context, int64_t pair) {
  const Layer &l = *static_cast<Layer *>(context);
  l.level->arrange(l.down[0].format, l.gates + pair * l.width, l.width, l.inner + pair * l.inner_width);
}

void down(void *context, int64_t i) {
  const Layer &l = *static_cast<Layer *>(context);
  const Piece &p = l.pieces[size_t(i)];
  const Routed &r = l.routed[size_t(p.routed)];
  const int64_t m = r.end - r.begin;
  float *terms = l.terms + r.begin * l.hidden;
  l.level->multiply(l.down[r.expert], l.inner + r.begin * l.inner_width, m, p.begin, p.end, terms, l.hidden);
  for (int64_t b = 0; b < m; b++)
    for (int64_t row = p.begin; row < p.end; row++) terms[b * l.hidden + row] *= l.weights[size_t(r.begin + b)];
}

thread_local Scratch x_memory, memory;

}  // namespace

void routed_experts(const Level *level, const Matrix *gate, const Matrix *up, const Matrix *down_, int64_t experts,
                    int64_t up_row, int64_t width, int64_t hidden, const float *x, int64_t tokens,
                    const int64_t *ids, const float *weights, int64_t k, float *out, int32_t threads) {
  std::memset(out, 0, size_t(tokens * hidden) * 4);
  if (!tokens || !k) return;
  const int64_t pairs = tokens * k;
  Layer l = {level, gate, up, down_, up_row, width, hidden, {}, {}, {}, {}, nullptr,
             nullptr, nullptr, nullptr, nullptr, 0, 0};
  std::vector<int64_t> at(size_t(experts) + 1, 0);  // a sort by counting
  for (int64_t i = 0; i < pairs; i++) at[size_t(ids[i]) + 1]++;
  for (int64_t e = 0; e < experts; e++) {
    if (at[size_t(e) + 1]) l.routed.push_back({e, at[size_t(e)], at[size_t(e)] + at[size_t(e) + 1]});
    at[size_t(e) + 1] += at[size_t(e)];
  }
  l.tokens.resize(size_t(pairs));
  l.weights.resize(size_t(pairs));
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t pair = at[size_t(ids[i])]++;
    l.tokens[size_t(pair)] = i / k;
    l.weights[size_t(pair)] = weights[i];
  }

  l.x_width = level->arranged(gate->format, hidden);
  l.inner_width = level->arranged(down_->format, width);
  float *arranged = x_memory.floats(tokens * l.x_width);
  for (int64_t t = 0; t < tokens; t++) level->arrange(gate->format, x + t * hidden, hidden, arranged + t * l.x_width);
  l.x = arranged;
  l.inner = memory.floats(pairs * (l.inner_width + 2 * width + hidden));  // first: it must be aligned
  l.gates = l.inner + pairs * l.inner_width;
  l.ups = l.gates + pairs * width;
  l.terms = l.ups + pairs * width;

  l.cut(width, 2 * gate->row_bytes);
  share(threads, int64_t(l.pieces.size()), gate_up, &l);
  share(pairs > 64 ? threads : 1, pairs, arrange_inner, &l);
  l.cut(hidden, down_->row_bytes);
  share(threads, int64_t(l.pieces.size()), down, &l);
  for (int64_t pair = 0; pair < pairs; pair++) {
    float *to = out + l.tokens[size_t(pair)] * hidden;
    const float *from = l.terms + pair * hidden;
    for (int64_t i = 0; i < hidden; i++) to[i] += from[i];
  }
}

}  // namespace oddrank
