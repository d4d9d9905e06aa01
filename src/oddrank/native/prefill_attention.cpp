// Attention of the tokens of prompts over what the cache holds of them, themselves included.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "operations.h"
#include "pool.h"
#include "scratch.h"

using namespace oddrank;

extern "C" {

// q, out and gate: [tokens, query heads, dim], rows q_row, out_row and gate_row apart, heads q_stride, dim and gate_stride.
// segments: of each sequence its slot, its first row of q, how many rows it has, and how many tokens came before them.
// queries[starts[h]] to queries[starts[h + 1] - 1] are the query heads of KV head h. A token sees itself and those before
// it, `window` in all (0: all of them). sinks: a score without a value for each query head, or null. gate, or null: sigmoid
// of it multiplies. Keep native/prefill.py alike.
struct PrefillArguments {
  const float *q;
  float *out;
  const float *gate, *sinks;
  const int64_t *segments, *starts, *queries;
  int64_t sequences, q_heads, kv_heads;
  int64_t q_row, q_stride, out_row, gate_row, gate_stride;
  int64_t window;
  Pages pages;
  float scale;
  int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t TOKENS = 32;  // of a piece of work: the same whatever the threads; a multiple of a level's panel

struct Piece {
  int64_t sequence, head, first;
};

struct Work {
  const PrefillArguments *a;
  const Operations *level;
  std::vector<Piece> pieces;
};

thread_local Scratch memory;

void one_piece(void *context, int64_t i) {
  const Work &w = *static_cast<Work *>(context);
  const PrefillArguments &a = *w.a;
  const Piece &p = w.pieces[size_t(i)];
  const int64_t *segment = a.segments + 4 * p.sequence, row = segment[1] + p.first;
  Block b;
  b.q = a.q + row * a.q_row;
  b.q_row = a.q_row;
  b.q_stride = a.q_stride;
  b.queries = a.queries + a.starts[p.head];
  b.count = a.starts[p.head + 1] - a.starts[p.head];
  b.pages = &a.pages;
  b.slot = segment[0];
  b.head = p.head;
  b.past = segment[3] + p.first;
  b.tokens = std::min(TOKENS, segment[2] - p.first);
  b.window = a.window;
  b.sinks = a.sinks;
  b.scale = a.scale;
  b.out = a.out + row * a.out_row;
  b.out_row = a.out_row;
  b.scratch = memory.floats(w.level->attend_block_scratch(b));
  w.level->attend_block(b);
  if (!a.gate) return;
  for (int64_t t = 0; t < b.tokens; t++)
    for (int64_t n = 0; n < b.count; n++)
      w.level->scale_by_sigmoid(b.out + t * b.out_row + b.queries[n] * a.pages.dim,
                                a.gate + (row + t) * a.gate_row + b.queries[n] * a.gate_stride, a.pages.dim);
}

}  // namespace

extern "C" void oddrank_prefill_attention(const PrefillArguments *a) {
  Work w = {a, &operations(), {}};
  int64_t most = 0;
  for (int64_t s = 0; s < a->sequences; s++) most = std::max(most, a->segments[4 * s + 2]);
  for (int64_t first = (most - 1) / TOKENS * TOKENS; first >= 0; first -= TOKENS)  // what sees most comes first
    for (int64_t s = 0; s < a->sequences; s++)
      for (int64_t h = 0; h < a->kv_heads; h++)
        if (first < a->segments[4 * s + 2] && a->starts[h] < a->starts[h + 1]) w.pieces.push_back({s, h, first});
  share(a->threads, int64_t(w.pieces.size()), one_piece, &w);
}
