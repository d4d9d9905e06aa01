// Which level's operations are in use: the one that products are computed with (api.cpp). And whether a level computes what
// the plainest does.
#include "operations.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "abi.h"

namespace oddrank {
namespace {

const Operations &of(const Level *level) {
#if defined(__x86_64__)
  if (level == &avx512_level || level == &avx512bf16_level) return avx512_operations;
  if (level == &avx2_level) return avx2_operations;
#else
  (void)level;
#endif
  return scalar_operations;
}

// Numbers between -1 and 1, the same every time.
std::vector<float> numbers(int64_t count, uint32_t seed) {
  std::vector<float> found(static_cast<size_t>(count));
  for (float &x : found) {
    seed = seed * 1664525u + 1013904223u;
    x = float(int32_t(seed)) / 2147483648.0f;
  }
  return found;
}

// What the operations give for rows, keys and states that are not whole vectors, and for some that are.
std::vector<float> sample(const Operations &level) {
  std::vector<float> all;
  const auto keep = [&](const std::vector<float> &some) { all.insert(all.end(), some.begin(), some.end()); };
  for (const int64_t n : {37, 64}) {
    const std::vector<float> x = numbers(n, 1), w = numbers(n, 2);
    std::vector<float> y(static_cast<size_t>(n)), z = x;
    level.norm(z.data(), w.data(), w.data(), y.data(), n, 1e-5f), keep(z), keep(y);
    level.unit(x.data(), y.data(), n, 1e-6f, 0.5f), keep(y);
    for (int32_t activation = SILU; activation <= RELU; activation++)
      level.gated(x.data(), w.data(), y.data(), n, activation), keep(y);
    level.scale_by_sigmoid(y.data(), x.data(), n), level.gate_by_silu(y.data(), w.data(), n), keep(y);
    z = x;
    level.rotate(z.data(), w.data(), x.data(), n / 2), level.add(z.data(), w.data(), n), keep(z);
    level.run_maxima(x.data(), n, y.data()), level.run_weights(w.data(), n, 1.0f, 2.0f, y.data() + 1), keep({y[0], y[1]});
    all.push_back(level.exponentials(x.data(), y.data(), n, 1.0f)), keep(y);
    level.products(w.data(), n, x.data(), 1, n, 0, 1, nullptr, y.data(), 1), keep(y);

    const int64_t count = 3, keys = 70, queries[] = {2, 0, 1};
    const std::vector<float> q = numbers(count * n, 3), cache = numbers(2 * keys * n, 4);
    std::vector<float> scratch(size_t(level.attend_scratch(n, count))), out(size_t(count * (n + 2)));
    for (const int32_t number : {AS_BF16, AS_F16, AS_F32}) {
      std::vector<float> stored(cache.size());
      level.to_number(cache.data(), stored.data(), 2 * keys * n, number);
      uint8_t *start = reinterpret_cast<uint8_t *>(stored.data());
      Pages pages = {start, start + keys * n * (number == AS_F32 ? 4 : 2), nullptr, 0, keys, 0, 0, n, number};
      level.attend({q.data(), queries, n, count, &pages, 0, 0, 0, keys, 0.5f, scratch.data(), out.data()}), keep(out);
    }

    std::vector<float> state = numbers(7 * n, 5), inputs = numbers(3 * n, 6), both(size_t(2 * n));
    level.recur({x.data(), w.data(), q.data(), state.data(), nullptr, 7, n, 0.9f, 0.5f, both.data(), y.data()});
    keep(y), keep(state);
    std::vector<float> turned(size_t(5 * n)), decay(5, -0.2f), beta(5, 0.7f);
    Chunk chunk = {q.data(), cache.data(), cache.data() + 40, n, decay.data(), beta.data(), state.data(), 5, 7, n, nullptr,
                   turned.data(), n};
    std::vector<float> memory(size_t(level.recur_chunk_scratch(chunk)));
    chunk.scratch = memory.data();
    level.recur_chunk(chunk), keep(turned), keep(state);
    level.convolve(x.data(), cache.data(), inputs.data(), y.data(), n, 4, 0, n), keep(y), keep(inputs);
  }
  return all;
}

}  // namespace

const Operations &operations() { return of(level_in_use()); }

}  // namespace oddrank

using namespace oddrank;

// Whether the operations of the level in use give, up to rounding, what those of the plainest level give.
extern "C" int32_t oddrank_operations_agree() {
  const std::vector<float> want = sample(scalar_operations), got = sample(operations());
  for (size_t i = 0; i < want.size(); i++)
    if (!(::fabsf(got[i] - want[i]) <= 1e-3f * (1.0f + ::fabsf(want[i])))) return 0;
  return 1;
}
