// Products of 4-bit numbers and 8-bit integers by integers: what a level's matrices that are not `exact` take.
//
// x becomes 16-bit integers, scaled by blocks of BLOCK columns: x = integer * scale, off by at most 2^-16 of the block's
// largest |x| (bf16 would round each by up to 2^-8 of it). Twice an e2m1 number is an integer, so a block's product is one too and
// exact, and so are codes and zero points; it is converted once, multiplied by both scales and summed in fp32. (Here a block is one of BLOCK columns of x; its weights
// have scales of 16 to 128 columns each.)
//
// An arranged x: GROUP words a group, in the order of the level's weights, where there are zero points followed by minus
// the sum of those of each lane, as two words, the second in units of 2^SUM_BITS; then a float a block, scale times a power of two that keeps all
// products in range; then a double that takes that power back. A block that is not finite has NaN for its scale.
//
// Included once by each level's file that has such products (and AVX2 at least), after
//
//   fixed_words(x, inverse, out)    the words of GROUP numbers that multiplied by `inverse` are at most 32767
//   fixed_sums<BITS>(out)           the sums of those words, behind them
//   fixed_scales(S(), p)            1 / UNIT times a group's scales, in the lanes' order
//   fixed_group<S, N>(p, s, x, words, scales, sums)    adds a group's products with N x to their sums
#pragma once

namespace oddrank {
namespace {

// STEP: bytes from a group to the next.
template <int STEP>
struct FixedX {
  static constexpr int GROUP = 128, WORDS = STEP, GROUPS = 4, BLOCK = GROUPS * GROUP;

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
// LEAST, MOST: between which powers of two the largest scale of x is brought. INTEGER: how often the number the integers
// of the weights are. CODES: whether scales are codes, some of which are not numbers. ZEROS: whether there are zero points.
// BYTES: of a group's weights.
struct FixedNvfp4 : FixedX<256> {
  static constexpr int BYTES = 64;
  static constexpr bool EARLY = false, CODES = true, ZEROS = false;
  static constexpr int INTEGER = 512;  // words are 256 times twice the weights
  static constexpr int SCALE_BYTES = 8, LEAST = 90, MOST = 90;
  static constexpr double UNIT = 0x1p120;  // e4m3's bits in fp32's places are 2^-120 times the number
  static bool bad(uint8_t code) { return (code & 0x7f) == 0x7f; }
  static inline __m256i bad(__m256i codes) {
    return _mm256_cmpeq_epi8(_mm256_or_si256(codes, _mm256_set1_epi8(-128)), _mm256_set1_epi8(-1));
  }
};

struct FixedMxfp4 : FixedX<256> {
  static constexpr int BYTES = 64;
  static constexpr bool EARLY = true, CODES = true, ZEROS = false;  // its scales alone reach over all of fp32
  static constexpr int INTEGER = 512;
  static constexpr int SCALE_BYTES = 4, LEAST = -75, MOST = 45;
  static constexpr double UNIT = 1;
  static bool bad(uint8_t code) { return code == 0xff; }
  static inline __m256i bad(__m256i codes) { return _mm256_cmpeq_epi8(codes, _mm256_set1_epi8(-1)); }
};

template <int COLUMNS>
struct FixedInt4 : FixedX<256 + 4 * WIDTH> {
  static constexpr bool EARLY = false, CODES = false, ZEROS = true;
  static constexpr int BYTES = 64, INTEGER = 1, SUM_BITS = 8;
  static constexpr int SCALE_BYTES = 4 * GROUP / COLUMNS, LEAST = 45, MOST = 45;  // a block's sum is up to 2^68 before
  static constexpr double UNIT = 1;
};

template <int COLUMNS, bool ZEROS_>
struct FixedInt8 : FixedX<256 + (ZEROS_ ? 4 * WIDTH : 0)> {
  static constexpr bool EARLY = false, CODES = false, ZEROS = ZEROS_;
  static constexpr int BYTES = 128, INTEGER = 1, SUM_BITS = 7;  // 128 times a zero point is a word
  static constexpr int SCALE_BYTES = (ZEROS ? 8 : 4) * 128 / COLUMNS, LEAST = 45, MOST = 45;  // up to 2^69 before
  static constexpr double UNIT = 1;
};

}  // namespace
}  // namespace oddrank
