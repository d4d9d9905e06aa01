// What the levels (one a set of CPU features) and the C interface share. Plain data only: every level is compiled with
// flags of its own, so nothing inline that the linker could merge may be here.
#pragma once
#include <cstdint>

namespace oddrank {

// A stored matrix [n, k]. Python fills it through ctypes: keep native/compiled.py alike.
struct Matrix {
  const uint8_t *values;  // row-major, as stored
  const uint8_t *scales;  // fp8: fp32; nvfp4: e4m3 a byte; mxfp4: exponents + 127, a byte; else unused
  int64_t n, k;
  int64_t row_bytes;           // from a row of values to the next
  int64_t scale_row;           // scales in a row of them
  int64_t block_n, block_k;    // rows and columns that an fp8 scale covers; 0: all
  float factor;                // multiplies every element
  int32_t format;
};

enum Format : int32_t { BF16 = 0, F16 = 1, E4M3 = 2, NVFP4 = 3, MXFP4 = 4, FORMATS = 5 };

// Kernels of one set of CPU features. x is "arranged": its numbers in the order in which the level decodes a row, zeros
// up to a whole group; `arranged` tells how many that makes, a multiple of 16.
struct Level {
  const char *name;
  int64_t (*arranged)(int32_t format, int64_t k);
  void (*arrange)(int32_t format, const float *x, int64_t k, float *out);
  // y[b * stride + row] = row . x[b] for rows [begin, end) and b < m; x: [m, arranged(k)]
  void (*multiply)(const Matrix &a, const float *x, int64_t m, int64_t begin, int64_t end, float *y, int64_t stride);
};

// The one that is computed with (api.cpp).
const Level *level_in_use();

extern const Level scalar_level;
#if defined(__x86_64__)
extern const Level avx2_level, avx512_level;
#endif

// See oddrank_experts in api.cpp.
void routed_experts(const Level *level, const Matrix *gate, const Matrix *up, const Matrix *down, int64_t experts,
                    int64_t up_row, int64_t width, int64_t hidden, const float *x, int64_t tokens,
                    const int64_t *ids, const float *weights, int64_t k, float *out, int32_t threads);

}  // namespace oddrank
