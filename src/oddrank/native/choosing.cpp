// Choosing tokens from logits, and which are the likeliest. Rows are looked at in runs: from the runs' maxima follows which
// of them can hold a candidate at all, so that little of a vocabulary is read twice.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "operations.h"
#include "rows.h"
#include "scratch.h"

using namespace oddrank;

extern "C" {

// How a row's token is drawn. temperature 0: its largest logit's. top_k 0: of all tokens. point: from 0 to below 1, where
// in the probabilities of those that may come, laid end to end.
struct Choice {
  double temperature, top_p, min_p, point;
  int64_t top_k;
};

// rows: `count` of `vocab` logits each. tokens: of each row, or -1 where its largest logit, which `largest` gets, is no
// finite number. Keep native/choosing.py alike.
struct ChooseArguments {
  const float *const *rows;
  const Choice *how;
  int64_t *tokens;
  float *largest;
  int64_t count, vocab;
  int32_t threads;
};

// ids, logprobs: [count, top], the likeliest tokens of each row, of equals the lower first. wanted: a token of each row;
// its logprob goes to wanted_logprobs. Where the largest logit is no finite number logprobs are NaN.
struct LikeliestArguments {
  const float *const *rows;
  const int64_t *wanted;
  int64_t *ids;
  float *logprobs, *wanted_logprobs;
  int64_t count, vocab, top;
  int32_t threads;
};

}  // extern "C"

namespace {

constexpr double FIRST_LOOK = 1.0 / 32;  // of the largest probability: tokens that are looked at first where many are cut

struct Candidate {
  double weight;
  float logit;
  int64_t id;
  bool operator<(const Candidate &other) const {
    return logit != other.logit ? logit > other.logit : id < other.id;
  }
};

thread_local Scratch run_memory, rank_memory;
thread_local std::vector<Candidate> candidates;

struct Row {
  const float *x;
  int64_t vocab, runs;
  float *maxima, *sums;  // of the runs
  float largest;
};

Row look(const float *x, int64_t vocab) {
  const int64_t runs = (vocab + RUN - 1) / RUN;
  float *memory = run_memory.floats(2 * runs);
  operations().run_maxima(x, vocab, memory);
  float largest = memory[0];
  for (int64_t i = 1; i < runs; i++)
    if (memory[i] > largest || memory[i] != memory[i]) largest = memory[i];
  return {x, vocab, runs, memory, memory + runs, largest};
}

// The sum of all weights e^((x - largest) * by).
double weigh(const Row &row, double by) {
  operations().run_weights(row.x, row.vocab, row.largest, float(by), row.sums);
  double total = 0;
  for (int64_t i = 0; i < row.runs; i++) total += double(row.sums[i]);
  return total;
}

// Fills `candidates` with all logits from `least` on, without weights.
void collect(const Row &row, float least) {
  candidates.clear();
  for (int64_t run = 0; run < row.runs; run++) {
    if (!(row.maxima[run] >= least)) continue;
    const int64_t end = std::min(row.vocab, (run + 1) * RUN);
    for (int64_t i = run * RUN; i < end; i++)
      if (row.x[i] >= least) candidates.push_back({0, row.x[i], i});
  }
}

// Fills `candidates` with the `top` largest logits in order, without weights.
void collect_top(const Row &row, int64_t top) {
  float least = -INFINITY;
  if (top <= row.runs) {  // so many runs have a logit of at least this
    float *ranked = rank_memory.floats(row.runs);
    std::copy(row.maxima, row.maxima + row.runs, ranked);
    std::nth_element(ranked, ranked + top - 1, ranked + row.runs, [](float a, float b) { return a > b; });
    least = ranked[top - 1];
  }
  collect(row, least);
  const auto end = candidates.begin() + std::min<int64_t>(top, int64_t(candidates.size()));
  std::partial_sort(candidates.begin(), end, candidates.end());
  candidates.erase(end, candidates.end());
}

int64_t first_of(const Row &row) {
  int64_t run = 0;
  while (row.maxima[run] != row.largest) run++;
  int64_t i = run * RUN;
  while (row.x[i] != row.largest) i++;
  return i;
}

// Of all tokens, in the order of the vocabulary.
int64_t draw_of_all(const Row &row, double by, double point) {
  point *= weigh(row, by);
  int64_t run = 0;
  for (; run + 1 < row.runs && point >= double(row.sums[run]); run++) point -= double(row.sums[run]);
  int64_t found = -1;
  const int64_t end = std::min(row.vocab, (run + 1) * RUN);
  for (int64_t i = run * RUN; i < end; i++) {
    const double weight = std::exp((double(row.x[i]) - double(row.largest)) * by);
    if (weight > 0) found = i;
    if (point < weight) return i;
    point -= weight;
  }
  return found >= 0 ? found : first_of(row);  // rounding: beyond the last
}

// Gives the candidates collected their weights, and the sum of these.
double weigh_candidates(const Row &row, double by) {
  double total = 0;
  for (Candidate &one : candidates) total += one.weight = std::exp((double(one.logit) - double(row.largest)) * by);
  return total;
}

// Fills `candidates` with the likeliest tokens, at least those that top_p and min_p leave, in no order. Gives the sum of
// all tokens' weights.
double collect_likely(const Row &row, const Choice &how, double by) {
  const double total = weigh(row, by);
  // All tokens that are less likely than this are together less likely than 1 - top_p.
  const double last = std::max(how.min_p, (1 - how.top_p) * total / double(row.vocab)) * 0.999;
  for (double least = FIRST_LOOK;; least *= FIRST_LOOK) {
    const bool ends = least <= last;
    const double from = double(row.largest) + std::log(std::max(least, last)) * how.temperature;
    collect(row, std::nextafter(float(from), -INFINITY));
    if (weigh_candidates(row, by) > how.top_p * total || ends) return total;
  }
}

int64_t draw(const Row &row, const Choice &how) {
  const double by = 1.0 / how.temperature;
  const bool few = how.top_k > 0 && how.top_k < row.vocab, cut = how.top_p < 1 || how.min_p > 0;
  if (!few && !cut) return draw_of_all(row, by, how.point);
  double total = 0;
  if (few) {
    collect_top(row, how.top_k);
    total = weigh_candidates(row, by);
  } else {
    total = collect_likely(row, how, by);
    std::sort(candidates.begin(), candidates.end());
  }
  double reached = 0;
  size_t kept = 0;
  for (; kept < candidates.size(); kept++) {
    const double weight = candidates[kept].weight;
    if (kept && (weight < how.min_p || (how.top_p < 1 && reached >= how.top_p * total))) break;
    reached += weight;
  }
  double point = how.point * reached;
  for (size_t i = 0; i < kept; i++) {
    if (point < candidates[i].weight) return candidates[i].id;
    point -= candidates[i].weight;
  }
  return candidates[kept - 1].id;
}

}  // namespace

extern "C" {

void oddrank_choose(const ChooseArguments *a) {
  share_rows(a->threads, a->count, a->vocab, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Row row = look(a->rows[i], a->vocab);
      a->largest[i] = row.largest;
      if (!std::isfinite(row.largest)) a->tokens[i] = -1;
      else a->tokens[i] = a->how[i].temperature > 0 ? draw(row, a->how[i]) : first_of(row);
    }
  });
}

void oddrank_likeliest(const LikeliestArguments *a) {
  share_rows(a->threads, a->count, a->vocab, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Row row = look(a->rows[i], a->vocab);
      int64_t *ids = a->ids + i * a->top;
      float *logprobs = a->logprobs + i * a->top;
      if (!std::isfinite(row.largest)) {
        a->wanted_logprobs[i] = NAN;
        for (int64_t k = 0; k < a->top; k++) ids[k] = k, logprobs[k] = NAN;
        continue;
      }
      const double log_total = double(row.largest) + std::log(weigh(row, 1));
      a->wanted_logprobs[i] = float(double(row.x[a->wanted[i]]) - log_total);
      if (a->top) collect_top(row, a->top);
      for (int64_t k = 0; k < a->top; k++) {
        ids[k] = candidates[size_t(k)].id;
        logprobs[k] = float(double(candidates[size_t(k)].logit) - log_total);
      }
    }
  });
}

}  // extern "C"
