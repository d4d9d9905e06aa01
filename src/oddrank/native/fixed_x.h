// Products of 4-bit floats by integers: what a level's matrices that are not `exact` take.
//
// x becomes 16-bit integers, scaled by blocks of BLOCK columns: x = integer * scale, off by at most 2^-16 of the block's
// largest |x| (bf16 would round each by up to 2^-8 of it). Twice an e2m1 number is an integer, so a block's product is one too and
// exact; it is converted once, multiplied by both scales and summed in fp32. (Here a block is one of BLOCK columns of x; its weights
// have scales of 16 or 32 columns each.)
//
// An arranged x: GROUP words a group, in the order of the level's weights; then a float a block, scale times a power of
// two that keeps all products in range; then a double that takes that power back. A block that is not finite has NaN for
// its scale.
//
// Included once by each level's file that has such products (and AVX2 at least), after
//
//   INTEGER             how often the number the integers of the weights are
//   fixed_words(x, inverse, out)    the words of GROUP numbers that multiplied by `inverse` are at most 32767
//   fixed_scales(FixedNvfp4(), p), fixed_scales(FixedMxfp4(), p)    UNIT times a group's scales, in the lanes' order
//   fixed_group<S, N>(p, s, x, words, scales, sums)    adds a group's products with N x to their sums
#pragma once

namespace oddrank {
namespace {

struct FixedX {
  static constexpr int GROUP = 128, WORDS = 2 * GROUP, GROUPS = 4, BLOCK = GROUPS * GROUP;

  static int64_t groups(int64_t k) { return (k + GROUP - 1) / GROUP; }
  static int64_t blocks(int64_t k) { return (k + BLOCK - 1) / BLOCK; }
  // An odd multiple of half of what the first cache's ways are apart: several x do not push each other out.
  static int64_t bytes(int64_t k) {
    const int64_t used = (groups(k) * WORDS + blocks(k) * 4 + 15) / 8 * 8;
    return ((used + 2047) / 4096 * 2 + 1) * 2048;
  }
  static float *scales(uint8_t *x, int64_t k) { return reinterpret_cast<float *>(x + groups(k) * WORDS); }
  static double *back(uint8_t *x, int64_t k) {
    return reinterpret_cast<double *>(x + (groups(k) * WORDS + blocks(k) * 4 + 7) / 8 * 8);
  }
};

// EARLY: whether products are multiplied by the scale of x before that of the weights, each, or afterwards, a block's sum.
// LEAST, MOST: between which powers of two the largest scale of x is brought.
struct FixedNvfp4 {
  static constexpr bool EARLY = false;
  static constexpr int SCALE_BYTES = 8, LEAST = 90, MOST = 90;
  static constexpr double UNIT = 0x1p120;  // e4m3's bits in fp32's places are 2^-120 times the number
  static bool bad(uint8_t code) { return (code & 0x7f) == 0x7f; }
  static inline __m256i bad(__m256i codes) {
    return _mm256_cmpeq_epi8(_mm256_or_si256(codes, _mm256_set1_epi8(-128)), _mm256_set1_epi8(-1));
  }
};

struct FixedMxfp4 {
  static constexpr bool EARLY = true;  // its scales alone reach over all of fp32
  static constexpr int SCALE_BYTES = 4, LEAST = -75, MOST = 45;
  static constexpr double UNIT = 1;
  static bool bad(uint8_t code) { return code == 0xff; }
  static inline __m256i bad(__m256i codes) { return _mm256_cmpeq_epi8(codes, _mm256_set1_epi8(-1)); }
};

}  // namespace
}  // namespace oddrank
