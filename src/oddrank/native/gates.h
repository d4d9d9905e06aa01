// The gates of a gated delta net's head, as numbers (Yang et al., 2024, arXiv 2412.06464, after Gu and Dao, 2023).
#pragma once
#include <cmath>

namespace oddrank {
namespace {

inline float softplus(float x) { return x > 20.0f ? x : ::log1pf(::expf(x)); }
inline float logistic(float x) { return 1.0f / (1.0f + ::expf(-x)); }

// The logarithm of a token's decay is this times softplus(a + dt_bias).
inline float head_rate(float a_log) { return -::expf(a_log); }

}  // namespace
}  // namespace oddrank
