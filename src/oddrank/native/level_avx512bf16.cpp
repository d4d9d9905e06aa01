// AVX-512 with products of bf16 pairs (BF16), of integers (VNNI) and look-ups of 128 bytes (VBMI).
#if defined(__x86_64__)
#include "avx512_decoders.h"
#include "int8.h"
#include "mxfp8.h"
#include "kernels.h"
#include "gemm.h"

#include "avx512_fixed.h"
#include "bf16_gemm.h"

namespace oddrank {
namespace {

int64_t arranged_here(const Matrix &a) { return fixed(a) ? fixed_arranged(a) : paired(a) ? pairs_arranged(a) : arranged(a); }

void arrange_here(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out) {
  fixed(a) ? fixed_arrange(a, x, m, stride, out) : paired(a) ? pairs_arrange(a, x, m, stride, out) : arrange(a, x, m, stride, out);
}

void multiply_here(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                   int64_t stride) {
  fixed(a)                              ? fixed_multiply(a, x, m, begin, end, y, stride)
  : !paired(a)                          ? multiply(a, x, m, begin, end, y, stride)
  : a.format == BF16 && m >= LANES_FROM ? lanes_multiply(a, x, m, begin, end, y, stride)
                                        : pairs_multiply(a, x, m, begin, end, y, stride);
}

const Gemm *gemm_here(const Matrix &a) { return gemm_of_pairs(a) ? &pairs_gemm : &gemm; }

int64_t gemm_from_here(const Matrix &a) { return gemm_of_pairs(a) ? PAIRS_GEMM_FROM : fixed(a) ? INT64_MAX : GEMM_FROM; }

}  // namespace

const Level avx512bf16_level = {"avx512bf16", arranged_here, arrange_here, multiply_here, gemm_here, gemm_from_here};
}  // namespace oddrank
#endif
