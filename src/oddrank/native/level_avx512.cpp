// AVX-512 F, BW, VL, DQ.
#if defined(__x86_64__)
#include "avx512_decoders.h"
#include "int8.h"
#include "mxfp8.h"
#include "kernels.h"
#include "gemm.h"

namespace oddrank {
const Level avx512_level = {"avx512", arranged, arrange, multiply, one_gemm, one_gemm_from};
}
#endif
