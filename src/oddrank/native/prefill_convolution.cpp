// The short convolution of prompts, and silu: every token of a sequence after the other, channels shared out.
#include <algorithm>
#include <cstdint>

#include "operations.h"
#include "pool.h"

using namespace oddrank;

extern "C" {

// x [tokens, channels], rows x_row apart -> y, dense. taps: [kernel, channels]. inputs: of each slot [kernel - 1, channels],
// slots inputs_slot apart, its last inputs, which go on. segments: as in prefill_attention.cpp. Keep native/prefill.py alike.
struct PrefillConvolutionArguments {
  const float *x, *taps;
  float *inputs, *y;
  const int64_t *segments;
  int64_t sequences, channels, kernel, x_row, inputs_slot;
  int32_t threads;
};

}  // extern "C"

namespace {

constexpr int64_t CHANNELS = 256;  // of a piece of work

struct Work {
  const PrefillConvolutionArguments *a;
  const Operations *level;
};

void one_piece(void *context, int64_t i) {
  const Work &w = *static_cast<Work *>(context);
  const PrefillConvolutionArguments &a = *w.a;
  const int64_t blocks = (a.channels + CHANNELS - 1) / CHANNELS, begin = i % blocks * CHANNELS;
  const int64_t *segment = a.segments + 4 * (i / blocks), end = std::min(a.channels, begin + CHANNELS);
  float *inputs = a.inputs + segment[0] * a.inputs_slot;
  for (int64_t row = segment[1]; row < segment[1] + segment[2]; row++)
    w.level->convolve(a.x + row * a.x_row, a.taps, inputs, a.y + row * a.channels, a.channels, a.kernel, begin, end);
}

}  // namespace

extern "C" void oddrank_prefill_convolution(const PrefillConvolutionArguments *a) {
  Work w = {a, &operations()};
  share(a->threads, a->sequences * ((a->channels + CHANNELS - 1) / CHANNELS), one_piece, &w);
}
