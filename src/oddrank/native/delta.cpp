// A decode step of a gated delta net: short convolution, one token into every head's state, gated norm of what it reads.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gates.h"
#include "operations.h"
#include "pool.h"
#include "rows.h"
#include "scratch.h"

using namespace oddrank;

extern "C" {

// One token of each sequence; sequence i has slot slots[i] of both states, or i where slots is null. qkv: [k_heads *
// key_width] queries, as many keys,
// [v_heads * value_width] values; z: as the values; b, a: a number a value head; of each, rows are row_stride apart. taps:
// [kernel, channels]. inputs: [slots, kernel - 1, channels], slots inputs_slot apart. memory: [slots, v_heads, key_width,
// value_width], memory_slot apart. partner: the key head of each value head. out: [sequences, v_heads * value_width]. Keep
// native/delta.py alike.
struct DeltaArguments {
  const float *qkv, *z, *b, *a, *taps;
  float *inputs, *memory;
  const float *a_log, *dt_bias, *norm;
  const int64_t *partner, *slots;
  float *out;
  int64_t sequences, k_heads, v_heads, key_width, value_width, kernel;
  int64_t row_stride, inputs_slot, memory_slot;
  float eps, unit_eps;
  int32_t threads;
};

}  // extern "C"

namespace {

int64_t slot_of(const DeltaArguments &a, int64_t sequence) { return a.slots ? a.slots[sequence] : sequence; }

constexpr int64_t CHANNELS = 1024;     // in a piece of the convolution
constexpr int64_t PIECES = 4;          // of a thread, so that one that is slower takes fewer
constexpr int64_t STATE = 128 << 10;   // bytes of states that one thread goes through before another would be awake

thread_local Scratch mixed_memory, head_memory;

struct Heads {
  const DeltaArguments *arguments;
  const Operations *level;
  const float *mixed;  // what the convolution gave, [sequences, channels]
  int64_t step;        // heads of a piece
};

void one_head(const Heads &h, int64_t sequence, int64_t head, bool last) {
  const DeltaArguments &a = *h.arguments;
  const int64_t key_head = a.partner[head];
  const int64_t keys = a.k_heads * a.key_width, values = a.v_heads * a.value_width;
  const float *mixed = h.mixed + sequence * (2 * keys + values);
  float *q = head_memory.floats(2 * a.key_width + 2 * a.value_width), *k = q + a.key_width;
  h.level->unit(mixed + key_head * a.key_width, q, a.key_width, a.unit_eps, 1.0f / ::sqrtf(float(a.key_width)));
  h.level->unit(mixed + keys + key_head * a.key_width, k, a.key_width, a.unit_eps, 1.0f);
  const int64_t at = sequence * a.row_stride + head;
  Recur one;
  one.q = q;
  one.k = k;
  one.v = mixed + 2 * keys + head * a.value_width;
  one.state = a.memory + slot_of(a, sequence) * a.memory_slot + head * a.key_width * a.value_width;
  one.next = last ? nullptr : one.state + a.key_width * a.value_width;
  one.key_width = a.key_width;
  one.value_width = a.value_width;
  one.decay = ::expf(head_rate(a.a_log[head]) * softplus(a.a[at] + a.dt_bias[head]));
  one.beta = logistic(a.b[at]);
  one.scratch = k + a.key_width;
  one.out = a.out + sequence * values + head * a.value_width;
  h.level->recur(one);
  h.level->norm(one.out, nullptr, a.norm, one.out, a.value_width, a.eps);
  h.level->gate_by_silu(one.out, a.z + sequence * a.row_stride + head * a.value_width, a.value_width);
}

// A few heads that lie one behind the other, so that each can ask for the next one's state.
void some_heads(void *context, int64_t piece) {
  const Heads &h = *static_cast<Heads *>(context);
  const int64_t heads = h.arguments->v_heads, runs = (heads + h.step - 1) / h.step;
  const int64_t begin = piece % runs * h.step, end = std::min(heads, begin + h.step);
  for (int64_t head = begin; head < end; head++) one_head(h, piece / runs, head, head + 1 == end);
}

}  // namespace

extern "C" {

void oddrank_delta(const DeltaArguments *a) {
  const Operations &level = operations();
  const int64_t channels = 2 * a->k_heads * a->key_width + a->v_heads * a->value_width;
  float *mixed = mixed_memory.floats(a->sequences * channels);
  const int64_t parts = (channels + CHANNELS - 1) / CHANNELS;
  share_rows(a->threads, a->sequences * parts, std::min(CHANNELS, channels), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t sequence = i / parts, from = i % parts * CHANNELS;
      level.convolve(a->qkv + sequence * a->row_stride, a->taps, a->inputs + slot_of(*a, sequence) * a->inputs_slot,
                     mixed + sequence * channels, channels, a->kernel, from, std::min(channels, from + CHANNELS));
    }
  });
  const int64_t bytes = a->sequences * a->v_heads * a->key_width * a->value_width * 8;
  const int threads = bytes < STATE ? 1 : a->threads;
  const int64_t step = std::max<int64_t>(1, a->v_heads / (PIECES * threads)), runs = (a->v_heads + step - 1) / step;
  Heads heads = {a, &level, mixed, step};
  share(threads, a->sequences * runs, some_heads, &heads);
}

}  // extern "C"
