// Eight rows of eight numbers to columns. In an unnamed namespace: levels are compiled with flags of their own.
#pragma once
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace oddrank {
namespace {

// to[j * to_stride + i] = row(i)[j] for i, j < 8. row(i): a pointer.
template <class Row>
inline __attribute__((always_inline)) void transpose8(Row row, float *to, int64_t to_stride) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(row(i));
  for (int i = 0; i < 8; i += 2) {  // pairs of rows, then fours, then halves
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
      a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xee);
    }
  for (int j = 0; j < 4; j++) {
    _mm256_storeu_ps(to + j * to_stride, _mm256_permute2f128_ps(a[j], a[j + 4], 0x20));
    _mm256_storeu_ps(to + (j + 4) * to_stride, _mm256_permute2f128_ps(a[j], a[j + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[j * to_stride + i] = row(i)[j];
#endif
}

}  // namespace
}  // namespace oddrank
