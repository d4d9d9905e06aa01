// Prompts through a gated delta net, after its short convolution (prefill_convolution.cpp): the tokens of each sequence into
// every head's state a chunk at a time, the gated norm of what they read.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gates.h"
#include "operations.h"
#include "pool.h"
#include "scratch.h"

using namespace oddrank;

extern "C" {

// mixed: [tokens, channels], what the convolution gave, dense: [k_heads * key_width] queries, as many keys, [v_heads *
// value_width] values. z: as the values; b, a: a number a value head; of each, rows are row_stride apart. memory: [slots,
// v_heads, key_width, value_width], memory_slot apart. partner: the key head of each value head. segments: as in
// prefill_attention.cpp. out: [tokens, v_heads * value_width]. Keep native/prefill.py alike.
struct PrefillDeltaArguments {
  const float *mixed, *z, *b, *a;
  float *memory;
  const float *a_log, *dt_bias, *norm;
  const int64_t *partner, *segments;
  float *out;
  int64_t sequences, k_heads, v_heads, key_width, value_width;
  int64_t row_stride, memory_slot;
  float eps, unit_eps;
  int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t CHUNK = 64;  // tokens: a state is read and written once for them

thread_local Scratch own;

struct Work {
  const PrefillDeltaArguments *a;
  const Operations *level;
};

// A head's tokens of one sequence.
void one_head(void *context, int64_t i) {
  const Work &w = *static_cast<Work *>(context);
  const PrefillDeltaArguments &a = *w.a;
  const int64_t head = i % a.v_heads, key_head = a.partner[head], *segment = a.segments + 4 * (i / a.v_heads);
  const int64_t keys = a.k_heads * a.key_width, values = a.v_heads * a.value_width, channels = 2 * keys + values;
  const int64_t most = std::min(CHUNK, segment[2]);
  Chunk c = {};
  c.key_width = a.key_width;
  c.value_width = a.value_width;
  c.v_row = channels;
  c.out_row = values;
  c.state = a.memory + segment[0] * a.memory_slot + head * a.key_width * a.value_width;
  c.tokens = most;
  float *q = own.floats(2 * most * (a.key_width + 1) + w.level->recur_chunk_scratch(c));
  float *k = q + most * a.key_width, *decay = k + most * a.key_width, *beta = decay + most;
  c.q = q, c.k = k, c.decay = decay, c.beta = beta, c.scratch = beta + most;
  const float rate = head_rate(a.a_log[head]), shrink = 1.0f / ::sqrtf(float(a.key_width));
  for (int64_t row = segment[1], end = row + segment[2]; row < end; row += c.tokens) {
    c.tokens = std::min(CHUNK, end - row);
    const float *mixed = a.mixed + row * channels;
    for (int64_t t = 0; t < c.tokens; t++) {
      const float *at = mixed + t * channels + key_head * a.key_width;
      w.level->unit(at, q + t * a.key_width, a.key_width, a.unit_eps, shrink);
      w.level->unit(at + keys, k + t * a.key_width, a.key_width, a.unit_eps, 1.0f);
      const int64_t gate = (row + t) * a.row_stride + head;
      decay[t] = rate * softplus(a.a[gate] + a.dt_bias[head]);
      beta[t] = logistic(a.b[gate]);
    }
    c.v = mixed + 2 * keys + head * a.value_width;
    c.out = a.out + row * values + head * a.value_width;
    if (c.tokens > 1) {
      w.level->recur_chunk(c);
    } else {  // of a sequence that decodes in a step with prompts
      w.level->recur({q, k, c.v, c.state, nullptr, a.key_width, a.value_width, ::expf(decay[0]), beta[0], c.scratch, c.out});
    }
    for (int64_t t = 0; t < c.tokens; t++) {
      float *out = c.out + t * values;
      w.level->norm(out, nullptr, a.norm, out, a.value_width, a.eps);
      w.level->gate_by_silu(out, a.z + (row + t) * a.row_stride + head * a.value_width, a.value_width);
    }
  }
}

}  // namespace

extern "C" void oddrank_prefill_delta(const PrefillDeltaArguments *a) {
  Work w = {a, &operations()};
  share(a->threads, a->sequences * a->v_heads, one_head, &w);
}
