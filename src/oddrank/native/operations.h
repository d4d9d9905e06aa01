// What a level computes beside products with stored matrices: functions of one thread on plain memory. Plain data only
// (see abi.h). Rows may lie anywhere; nothing need be aligned.
#pragma once
#include <cstdint>

#include "pages.h"

namespace oddrank {

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

// Some queries of one KV head against keys [begin, end) of one sequence, which lie in one run of a page or several.
struct Attend {
  const float *q;          // query i is at q + queries[i] * q_stride
  const int64_t *queries;
  int64_t q_stride, count;
  const Pages *pages;
  int64_t slot, head;
  int64_t begin, end;
  float scale;
  float *scratch;  // attend_scratch(dim, count) numbers
  float *out;      // of each query: dim weighted values (not divided), the largest score, the sum of weights
};

// Consecutive tokens of a sequence, of the query heads of one KV head. Token t has position past + t.
struct Block {
  const float *q;          // of token t and head queries[n] at q + t * q_row + queries[n] * q_stride
  int64_t q_row, q_stride;
  const int64_t *queries;
  int64_t count;
  const Pages *pages;
  int64_t slot, head;
  int64_t past, tokens, window;
  const float *sinks;  // of each query head, or null
  float scale;
  float *out;          // of token t and query head h at out + t * out_row + h * dim
  int64_t out_row;
  float *scratch;      // attend_block_scratch numbers
};

// One value head of a gated delta net and one token.
struct Recur {
  const float *q, *k;  // [key width], of length one; q scaled
  const float *v;      // [value width]
  float *state;        // [key width, value width]
  const float *next;   // the state that is gone through next, or null
  int64_t key_width, value_width;
  float decay, beta;
  float *scratch;  // 2 * value width
  float *out;      // [value width]
};

// Likewise, and consecutive tokens of one sequence.
struct Chunk {
  const float *q, *k;  // [tokens, key width]
  const float *v;      // [tokens, value width], rows v_row apart
  int64_t v_row;
  const float *decay, *beta;  // [tokens]; of the decay the logarithm
  float *state;
  int64_t tokens, key_width, value_width;
  float *scratch;  // recur_chunk_scratch numbers
  float *out;      // as v, rows out_row apart
  int64_t out_row;
};

struct Operations {
  // x += delta (unless null); y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
  void (*norm)(float *x, const float *delta, const float *weight, float *y, int64_t n, float eps);
  // y = x / sqrt(sum(x^2) + eps) * factor
  void (*unit)(const float *x, float *y, int64_t n, float eps, float factor);
  // The first 2 * half numbers of x are turned: (a, b) -> (a cos + b sin, b cos + a sin); sin's first half is negative.
  void (*rotate)(float *x, const float *cos, const float *sin, int64_t half);
  void (*to_number)(const float *x, void *out, int64_t n, int32_t number);
  int64_t (*attend_scratch)(int64_t dim, int64_t count);
  void (*attend)(const Attend &a);
  void (*gated)(const float *gate, const float *up, float *y, int64_t n, int32_t activation);
  void (*scale)(float *y, int64_t n, float factor);
  void (*scale_by_sigmoid)(float *y, const float *gate, int64_t n);
  void (*gate_by_silu)(float *y, const float *gate, int64_t n);
  void (*add)(float *x, const float *y, int64_t n);
  // y = e^(x - most), gives the sum
  float (*exponentials)(const float *x, float *y, int64_t n, float most);
  // y[i] = row begin + i of a [rows, k] . x, for rows [begin, end)
  void (*products)(const float *a, int64_t k, const float *x, int64_t m, int64_t x_stride, int64_t begin, int64_t end,
                   const float *bias, float *y, int64_t y_stride);
  // A step of a short convolution and silu: inputs [kernel - 1, channels] moves on by x; taps: [kernel, channels].
  void (*convolve)(const float *x, const float *taps, float *inputs, float *y, int64_t channels, int64_t kernel,
                   int64_t begin, int64_t end);
  void (*recur)(const Recur &r);
  int64_t (*recur_chunk_scratch)(const Chunk &c);
  void (*recur_chunk)(const Chunk &c);
  int64_t (*attend_block_scratch)(const Block &b);
  void (*attend_block)(const Block &b);
  // Of every RUN numbers of x, the last of them perhaps fewer: the largest, NaN where one is NaN.
  void (*run_maxima)(const float *x, int64_t n, float *out);
  // Likewise: the sum of e^((x - most) * by)
  void (*run_weights)(const float *x, int64_t n, float most, float by, float *out);
};

constexpr int64_t RUN = 64;

extern const Operations scalar_operations;
#if defined(__x86_64__)
extern const Operations avx2_operations, avx512_operations;
#endif

// Of the level in use.
const Operations &operations();

}  // namespace oddrank
