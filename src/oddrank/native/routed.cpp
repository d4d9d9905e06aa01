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

// out: [tokens, hidden] = the sum over each token's k experts, all different, of weights times
// down(silu(gate x) * up x). gate, up, down: one an expert, [width, hidden], [width, hidden], [hidden, width]; where gate
// and up are one matrix up_row is the first of up's rows, else 0. x: [tokens, hidden]; ids and weights: [tokens, k].
struct ExpertsArguments {
  const Matrix *gate, *up, *down;
  int64_t experts, up_row, width, hidden;
  const float *x;
  int64_t tokens;
  const int64_t *ids;
  const float *weights;
  int64_t k;
  float *out;
  int32_t threads;
};

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
  std::vector<const uint8_t *> x;      // of each pair, arranged
  std::vector<const uint8_t *> inner;  // likewise
  uint8_t *inner_memory;               // [pairs, inner_bytes]
  float *gates, *ups, *terms;
  int64_t inner_bytes;

  void cut(int64_t rows, int64_t row_bytes) {
    pieces.clear();
    const int64_t step = std::max<int64_t>(4, PIECE / std::max<int64_t>(1, row_bytes) / 4 * 4);
    for (size_t r = 0; r < routed.size(); r++)
      for (int64_t begin = 0; begin < rows; begin += step)
        pieces.push_back({int32_t(r), begin, std::min(rows, begin + step)});
  }
};

float silu(float v) { return v / (1.0f + std::exp(-v)); }

void gate_up(void *context, int64_t i) {
  const Layer &l = *static_cast<Layer *>(context);
  const Piece &p = l.pieces[size_t(i)];
  const Routed &r = l.routed[size_t(p.routed)];
  const int64_t m = r.end - r.begin;
  const uint8_t *const *x = l.x.data() + r.begin;
  float *gates = l.gates + r.begin * l.width, *ups = l.ups + r.begin * l.width;
  l.level->multiply(l.gate[r.expert], x, m, p.begin, p.end, gates + p.begin, l.width);
  l.level->multiply(l.up[r.expert], x, m, p.begin + l.up_row, p.end + l.up_row, ups + p.begin, l.width);
  for (int64_t b = 0; b < m; b++)
    for (int64_t row = p.begin; row < p.end; row++) {
      float &g = gates[b * l.width + row];
      g = silu(g) * ups[b * l.width + row];
    }
}

void arrange_inner(void *context, int64_t pair) {
  const Layer &l = *static_cast<Layer *>(context);
  l.level->arrange(l.down[0], l.gates + pair * l.width, 1, l.width, l.inner_memory + pair * l.inner_bytes);
}

void down(void *context, int64_t i) {
  const Layer &l = *static_cast<Layer *>(context);
  const Piece &p = l.pieces[size_t(i)];
  const Routed &r = l.routed[size_t(p.routed)];
  const int64_t m = r.end - r.begin;
  float *terms = l.terms + r.begin * l.hidden;
  l.level->multiply(l.down[r.expert], l.inner.data() + r.begin, m, p.begin, p.end, terms + p.begin, l.hidden);
  for (int64_t b = 0; b < m; b++)
    for (int64_t row = p.begin; row < p.end; row++) terms[b * l.hidden + row] *= l.weights[size_t(r.begin + b)];
}

thread_local Scratch x_memory, memory;

}  // namespace
}  // namespace oddrank

using namespace oddrank;

extern "C" void oddrank_experts(const ExpertsArguments *arguments) {
  const ExpertsArguments &a = *arguments;
  std::memset(a.out, 0, size_t(a.tokens * a.hidden) * 4);
  if (!a.tokens || !a.k) return;
  const Level *level = level_in_use();
  const int64_t pairs = a.tokens * a.k;
  Layer l = {level, a.gate, a.up, a.down, a.up_row, a.width, a.hidden, {}, {}, {}, {}, {}, {},
             nullptr, nullptr, nullptr, nullptr, 0};
  std::vector<int64_t> at(size_t(a.experts) + 1, 0);  // a sort by counting
  for (int64_t i = 0; i < pairs; i++) at[size_t(a.ids[i]) + 1]++;
  for (int64_t e = 0; e < a.experts; e++) {
    if (at[size_t(e) + 1]) l.routed.push_back({e, at[size_t(e)], at[size_t(e)] + at[size_t(e) + 1]});
    at[size_t(e) + 1] += at[size_t(e)];
  }
  const int64_t x_bytes = level->arranged(a.gate[0]);
  uint8_t *arranged = reinterpret_cast<uint8_t *>(x_memory.floats(a.tokens * x_bytes / 4));
  level->arrange(a.gate[0], a.x, a.tokens, a.hidden, arranged);
  l.inner_bytes = level->arranged(a.down[0]);
  float *own = memory.floats(pairs * (l.inner_bytes / 4 + 2 * a.width + a.hidden));
  l.inner_memory = reinterpret_cast<uint8_t *>(own);  // first: it must be aligned
  l.gates = own + pairs * l.inner_bytes / 4;
  l.ups = l.gates + pairs * a.width;
  l.terms = l.ups + pairs * a.width;

  l.tokens.resize(size_t(pairs));
  l.x.resize(size_t(pairs));
  l.inner.resize(size_t(pairs));
  l.weights.resize(size_t(pairs));
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t pair = at[size_t(a.ids[i])]++;
    l.tokens[size_t(pair)] = i / a.k;
    l.weights[size_t(pair)] = a.weights[i];
    l.x[size_t(pair)] = arranged + i / a.k * x_bytes;
    l.inner[size_t(pair)] = l.inner_memory + pair * l.inner_bytes;
  }

  l.cut(a.width, 2 * a.gate[0].row_bytes);
  share(a.threads, int64_t(l.pieces.size()), gate_up, &l);
  share(pairs > 64 ? a.threads : 1, pairs, arrange_inner, &l);
  l.cut(a.hidden, a.down[0].row_bytes);
  share(a.threads, int64_t(l.pieces.size()), down, &l);
  for (int64_t pair = 0; pair < pairs; pair++) {
    float *to = a.out + l.tokens[size_t(pair)] * a.hidden;
    const float *from = l.terms + pair * a.hidden;
    for (int64_t i = 0; i < a.hidden; i++) to[i] += from[i];
  }
}
