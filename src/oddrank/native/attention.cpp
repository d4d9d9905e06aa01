// Attention of one token of each of several sequences over what the cache holds of it, the token itself included.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "operations.h"
#include "pool.h"
#include "scratch.h"

using namespace oddrank;

extern "C" {

// q, out and gate: [sequences, query heads, dim], rows q_row, out_row and gate_row apart, heads q_stride, dim and
// gate_stride. queries[starts[h]] to queries[starts[h + 1] - 1] are the query heads of KV head h. Sequence i is in slot i and
// sees the `window` last of its positions[i] + 1 tokens (0: all). sinks: a score without a value for each query head, or
// null. gate, or null: sigmoid of it multiplies. Keep native/attention.py alike.
struct AttentionArguments {
  const float *q;
  float *out;
  const float *gate, *sinks;
  const int64_t *positions, *starts, *queries;
  int64_t sequences, q_heads, kv_heads;
  int64_t q_row, q_stride, out_row, gate_row, gate_stride;
  int64_t window;
  Pages pages;
  float scale;
  int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t CHUNK = 512;         // keys that one piece of work takes: the same whatever the threads
constexpr int64_t ALONE = 128 << 10;   // bytes of keys and values read before another thread would be awake

thread_local Scratch partial_memory, piece_memory;
thread_local std::vector<int64_t> firsts;

struct Work {
  const AttentionArguments *a;
  const Operations *level;
  const int64_t *firsts;  // of each sequence, its first chunk among all; and the end
  float *partial;         // [chunk of all, query heads in order of `queries`, dim + 2]
};

int64_t begin_of(const AttentionArguments &a, int64_t sequence) {
  const int64_t length = a.positions[sequence] + 1;
  return a.window && length > a.window ? length - a.window : 0;
}

void one_piece(void *context, int64_t piece) {
  const Work &w = *static_cast<Work *>(context);
  const AttentionArguments &a = *w.a;
  const int64_t chunk = piece / a.kv_heads, head = piece % a.kv_heads, count = a.starts[head + 1] - a.starts[head];
  if (!count) return;  // nobody reads a dummy
  const int64_t sequence = std::upper_bound(w.firsts, w.firsts + a.sequences + 1, chunk) - w.firsts - 1;
  const int64_t begin = begin_of(a, sequence) + (chunk - w.firsts[sequence]) * CHUNK;
  Attend one;
  one.q = a.q + sequence * a.q_row;
  one.queries = a.queries + a.starts[head];
  one.q_stride = a.q_stride;
  one.count = count;
  one.pages = &a.pages;
  one.slot = sequence;
  one.head = head;
  one.begin = begin;
  one.end = std::min(begin + CHUNK, a.positions[sequence] + 1);
  one.scale = a.scale;
  one.scratch = piece_memory.floats(w.level->attend_scratch(a.pages.dim, count));
  one.out = w.partial + (chunk * a.q_heads + a.starts[head]) * (a.pages.dim + 2);
  w.level->attend(one);
}

// Puts a query's chunks together, in their order.
void join(const Work &w, int64_t sequence, int64_t place) {
  const AttentionArguments &a = *w.a;
  const int64_t dim = a.pages.dim, query = a.queries[place], apart = a.q_heads * (dim + 2);
  const int64_t chunks = w.firsts[sequence + 1] - w.firsts[sequence];
  const float *parts = w.partial + (w.firsts[sequence] * a.q_heads + place) * (dim + 2);
  float *out = a.out + sequence * a.out_row + query * dim;
  float most = a.sinks ? a.sinks[query] : -INFINITY;
  for (int64_t c = 0; c < chunks; c++) most = std::max(most, parts[c * apart + dim]);
  float total = a.sinks ? ::expf(a.sinks[query] - most) : 0.0f;
  for (int64_t c = 0; c < chunks; c++) {
    const float *part = parts + c * apart;
    const float by = chunks == 1 && !a.sinks ? 1.0f : ::expf(part[dim] - most);
    total += part[dim + 1] * by;
    for (int64_t i = 0; i < dim; i++) out[i] = c ? out[i] + part[i] * by : part[i] * by;
  }
  w.level->scale(out, dim, 1.0f / total);
  if (a.gate) w.level->scale_by_sigmoid(out, a.gate + sequence * a.gate_row + query * a.gate_stride, dim);
}

}  // namespace

extern "C" {

void oddrank_attention(const AttentionArguments *a) {
  firsts.resize(size_t(a->sequences) + 1);
  int64_t tokens = 0;
  firsts[0] = 0;
  for (int64_t i = 0; i < a->sequences; i++) {
    const int64_t seen = a->positions[i] + 1 - begin_of(*a, i);
    tokens += seen;
    firsts[size_t(i) + 1] = firsts[size_t(i)] + (seen + CHUNK - 1) / CHUNK;
  }
  const int64_t chunks = firsts[size_t(a->sequences)];
  Work work = {a, &operations(), firsts.data(), partial_memory.floats(chunks * a->q_heads * (a->pages.dim + 2))};
  const int64_t bytes = 2 * tokens * a->kv_heads * a->pages.dim * bytes_of(a->pages);
  share(bytes < ALONE ? 1 : a->threads, chunks * a->kv_heads, one_piece, &work);
  for (int64_t i = 0; i < a->sequences; i++)
    for (int64_t place = 0; place < a->q_heads; place++) join(work, i, place);
}

}  // extern "C"
