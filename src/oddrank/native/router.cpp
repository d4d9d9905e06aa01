// Which experts a token goes to.
#include <cstdint>

#include "operations.h"
#include "rows.h"
#include "scratch.h"

using namespace oddrank;

namespace {
thread_local Scratch chance_memory;
}

extern "C" {

// scores: [tokens, experts], rows scores_row apart. ids, weights: [tokens, chosen], the most probable experts by softmax,
// the first of equals first, and their probabilities over the sum of these. Keep native/router.py alike.
struct RouterArguments {
  const float *scores;
  int64_t *ids;
  float *weights;
  int64_t tokens, experts, chosen, scores_row;
  int32_t threads;
};

void oddrank_router(const RouterArguments *a) {
  const Operations &level = operations();
  share_rows(a->threads, a->tokens, a->experts * 2, [&](int64_t begin, int64_t end) {
    float *chances = chance_memory.floats(a->experts);
    for (int64_t t = begin; t < end; t++) {
      const float *scores = a->scores + t * a->scores_row;
      float most = scores[0];
      for (int64_t e = 1; e < a->experts; e++) most = scores[e] > most ? scores[e] : most;
      level.exponentials(scores, chances, a->experts, most);
      int64_t *ids = a->ids + t * a->chosen;
      float *weights = a->weights + t * a->chosen, total = 0;
      // Chances are at least 0; one that is taken becomes -1. NaN is taken before any number, each expert once.
      for (int64_t i = 0; i < a->chosen; i++) {
        int64_t best = -1;
        float chance = -1;
        for (int64_t e = 0; e < a->experts; e++)
          if (chances[e] > chance || (chances[e] != chances[e] && chance == chance)) chance = chances[e], best = e;
        ids[i] = best;
        weights[i] = chance;
        chances[best] = -1;
        total += chance;
      }
      level.scale(weights, a->chosen, 1.0f / total);
    }
  });
}

}  // extern "C"
