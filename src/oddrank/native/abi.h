// What the levels (one a set of CPU features) and the C interface share. Plain data only: every level is compiled with
// flags of its own, so nothing inline that the linker could merge may be here.
#pragma once
#include <cstdint>

namespace oddrank {

// A stored matrix [n, k]. Python fills it through ctypes: keep native/compiled.py alike.
struct Matrix {
  const uint8_t *values;  // row-major, as stored
  const uint8_t *scales;  // fp8: fp32; nvfp4: e4m3 a byte; mxfp4, mxfp8: exponents + 127, a byte; integers: below; else unused
  int64_t n, k;
  int64_t row_bytes;           // from a row of values to the next
  int64_t scale_row;           // scales in a row of them; integers: bytes
  int64_t block_n, block_k;    // rows and columns that an fp8 scale covers, 0: all; integers: columns, 32, 64 or 128
  float factor;                // multiplies every element
  int32_t format;
  int32_t exact;               // 0: products may round x, to bf16 or finer
  int32_t unused;
  const int32_t *order;        // [k], the column of x that a column of the matrix belongs to; null: its own
};

// INT4: (code - zero) * scale, codes of 0 to 15, two a byte, the low nibble first. A scale and its zero are a word: fp32
// whose low byte is the zero, 0 to 16, and no part of the number. INT8: signed bytes times fp32 scales. INT8_ZEROS:
// (byte - zero) * scale, a word after each scale: the zero, -128 to 128, in its low half and 128 times it in the other.
// Scales are at most 2^40.
enum Format : int32_t {
  BF16 = 0, F16 = 1, E4M3 = 2, NVFP4 = 3, MXFP4 = 4, INT4 = 5, INT8 = 6, INT8_ZEROS = 7, MXFP8 = 8, FORMATS = 9
};

struct Gemm;  // products with many x, see gemm_abi.h

// Kernels of one set of CPU features. x is "arranged" first: made what the kernel of a matrix's format reads, in the
// order in which it decodes a row. Matrices that are `alike` take the same. They know nothing of `order`: x comes in the
// order of the matrix's columns.
struct Level {
  const char *name;
  // Bytes of an arranged x, a multiple of 64.
  int64_t (*arranged)(const Matrix &a);
  // x: [m, a.k], rows `stride` numbers apart; out: [m, arranged(a) bytes]
  void (*arrange)(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out);
  // y[b * stride + row - begin] = row . x[b] for rows [begin, end) and b < m; x: pointers to arranged ones
  void (*multiply)(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                   int64_t stride);
  // What multiplies many x, and from how many on that is faster than `multiply`.
  const Gemm *(*gemm)(const Matrix &a);
  int64_t (*gemm_from)(const Matrix &a);
};

// Scales of e4m3 that do not cover whole groups of a level's may be computed in another way than others.
constexpr int64_t SEGMENTS = 64;
inline constexpr bool alike(const Matrix &a, const Matrix &b) {
  return a.format == b.format && a.exact == b.exact && a.order == b.order && (a.block_k % SEGMENTS == 0) == (b.block_k % SEGMENTS == 0);
}

extern const Level scalar_level;
#if defined(__x86_64__)
extern const Level avx2_level, avx512_level, avx512bf16_level;
#endif

// The level that all calls compute with.
const Level *level_in_use();

}  // namespace oddrank
