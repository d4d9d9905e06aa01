// What ranks do together in their shared memory, as operations that a decode step may hold: sums and gathered columns.
// Every one works in steps; what is read after step k lies in buffer k % 2 (see runtime/parallel/shm.py).
#include <algorithm>
#include <cstring>

#include "failed.h"
#include "numbers.h"
#include "ranks.h"

namespace oddrank {

struct AllReduceArguments {
  Ranks *ranks;
  void *data;          // contiguous, summed in place
  int64_t count;
  int64_t dtype;       // position in shm.py's list
  uint64_t signature;  // of the first `steps`; the last has another where its length differs
  uint64_t last_signature;
  int64_t in_parts;  // whether each rank sums a part and all read the parts
};

struct GatherColumnsArguments {
  Ranks *ranks;           // null: one rank alone
  const uint8_t *x;       // [rows, widths[rank]], contiguous
  uint8_t *out;           // [rows, columns]
  const int64_t *widths;  // of each rank
  const int64_t *place;   // the column in `out` of each gathered one, -1: nowhere; null: the first `columns`, in order
  int64_t rows, columns, item_bytes;
  uint64_t signature;
};

namespace {

constexpr int64_t BLOCK = 512;  // numbers summed at a time: their sums stay in the nearest cache

// out[i] = the sum over ranks of at(r)[i], in the order of ranks
template <class N, class At>
void add_up(const Ranks &ranks, typename N::Stored *out, int64_t count, At at) {
  using Sum = typename N::Sum;
  Sum sums[BLOCK];
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t n = std::min(BLOCK, count - start);
    const auto *first = at(0) + start;
    for (int64_t i = 0; i < n; i++) sums[i] = N::widen(first[i]);
    for (int64_t r = 1; r < ranks.size; r++) {
      const auto *next = at(r) + start;
      for (int64_t i = 0; i < n; i++) sums[i] = N::add(sums[i], N::widen(next[i]));
    }
    for (int64_t i = 0; i < n; i++) out[start + i] = N::narrow(sums[i]);
  }
}

// Every rank reads all terms and adds them up itself: one meeting a slot's length.
template <class N>
bool reduce_whole(const AllReduceArguments &a) {
  using T = typename N::Stored;
  Ranks &ranks = *a.ranks;
  T *data = static_cast<T *>(a.data);
  const int64_t most = ranks.slot_bytes / int64_t(sizeof(T));
  int64_t start = 0;
  do {
    const int64_t n = std::min(most, a.count - start), buffer = (ranks.step + 1) & 1;
    std::memcpy(ranks.data(buffer, ranks.rank), data + start, size_t(n) * sizeof(T));
    if (!meet(ranks, start + most < a.count ? a.signature : a.last_signature)) return false;
    add_up<N>(ranks, data + start, n, [&](int64_t r) {
      return r == ranks.rank ? data + start : reinterpret_cast<const T *>(ranks.data(buffer, r));
    });
    start += most;
  } while (start < a.count);
  return true;
}

// A slot has a region for every rank: for the terms that this one gives it, and in this one's own what it has summed of
// the numbers before. So a rank reads each number twice, however many ranks there are.
template <class N>
bool reduce_in_parts(const AllReduceArguments &a) {
  using T = typename N::Stored;
  Ranks &ranks = *a.ranks;
  const int64_t size = ranks.size, region = ranks.slot_bytes / int64_t(sizeof(T)) / size / 64 * 64;
  const int64_t each = region * size, rounds = (a.count + each - 1) / each;
  struct Span {
    T *data;
    int64_t count;
  };
  const auto part = [&](int64_t round, int64_t rank) {
    const int64_t n = std::min(each, a.count - round * each), share = (n + size * 64 - 1) / (size * 64) * 64;
    const int64_t begin = std::min(n, rank * share), end = std::min(n, begin + share);
    return Span{static_cast<T *>(a.data) + round * each + begin, end - begin};
  };
  const auto region_of = [&](int64_t buffer, int64_t owner, int64_t of) {
    return reinterpret_cast<T *>(ranks.data(buffer, owner)) + of * region;
  };
  for (int64_t round = 0; round <= rounds; round++) {
    const int64_t buffer = (ranks.step + 1) & 1;
    for (int64_t r = 0; r < size; r++) {
      if (r == ranks.rank ? round == 0 : round == rounds) continue;
      const Span span = r == ranks.rank ? part(round - 1, r) : part(round, r);
      std::memcpy(region_of(buffer, ranks.rank, r), span.data, size_t(span.count) * sizeof(T));
    }
    if (!meet(ranks, a.signature)) return false;
    if (round < rounds) {
      const Span own = part(round, ranks.rank);
      add_up<N>(ranks, own.data, own.count, [&](int64_t r) {
        return r == ranks.rank ? own.data : region_of(buffer, r, ranks.rank);
      });
    }
    if (round == 0) continue;
    for (int64_t r = 0; r < size; r++) {
      if (r == ranks.rank) continue;
      const Span span = part(round - 1, r);
      std::memcpy(span.data, region_of(buffer, r, r), size_t(span.count) * sizeof(T));
    }
  }
  return true;
}

template <class N>
bool reduce(const AllReduceArguments &a) {
  return a.in_parts ? reduce_in_parts<N>(a) : reduce_whole<N>(a);
}

bool reduce_any(const AllReduceArguments &a) {
  switch (a.dtype) {
    case 0: return reduce<BFloat>(a);
    case 1: return reduce<HalfFloat>(a);
    case 2: return reduce<Plain<float>>(a);
    case 3: return reduce<Plain<double>>(a);
    case 4:
    case 5: return reduce<Plain<uint8_t>>(a);
    case 6: return reduce<Plain<uint16_t>>(a);
    case 7: return reduce<Plain<uint32_t>>(a);
    case 8: return reduce<Plain<uint64_t>>(a);
    default: return reduce<Truth>(a);
  }
}

template <class T>
void scatter_as(const uint8_t *from, uint8_t *out, const int64_t *place, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (place[i] >= 0) reinterpret_cast<T *>(out)[place[i]] = reinterpret_cast<const T *>(from)[i];
}

// Numbers [begin, end) of a rank's rows laid end to end, to where they belong. first: its first gathered column.
void put(const GatherColumnsArguments &a, const uint8_t *from, int64_t first, int64_t width, int64_t begin,
         int64_t end) {
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / width, column = at % width, n = std::min(width - column, end - at);
    uint8_t *out = a.out + row * a.columns * a.item_bytes;
    if (!a.place) {
      const int64_t to = first + column, kept = std::min(n, a.columns - to);
      if (kept > 0) std::memcpy(out + to * a.item_bytes, from, size_t(kept * a.item_bytes));
    } else {
      const int64_t *place = a.place + first + column;
      switch (a.item_bytes) {
        case 1: scatter_as<uint8_t>(from, out, place, n); break;
        case 2: scatter_as<uint16_t>(from, out, place, n); break;
        case 4: scatter_as<uint32_t>(from, out, place, n); break;
        default: scatter_as<uint64_t>(from, out, place, n);
      }
    }
    from += n * a.item_bytes;
    at += n;
  }
}

bool gather_columns(const GatherColumnsArguments &a) {
  if (!a.ranks) {
    put(a, a.x, 0, a.widths[0], 0, a.rows * a.widths[0]);
    return true;
  }
  Ranks &ranks = *a.ranks;
  const int64_t most = ranks.slot_bytes / a.item_bytes;
  const int64_t longest = a.rows * *std::max_element(a.widths, a.widths + ranks.size);
  const int64_t mine = a.rows * a.widths[ranks.rank];
  int64_t start = 0;
  do {
    const int64_t buffer = (ranks.step + 1) & 1, n = std::min(most, mine - start);
    if (n > 0) std::memcpy(ranks.data(buffer, ranks.rank), a.x + start * a.item_bytes, size_t(n * a.item_bytes));
    if (!meet(ranks, a.signature)) return false;
    for (int64_t r = 0, first = 0; r < ranks.size; first += a.widths[r++]) {
      const uint8_t *from = r == ranks.rank ? a.x + start * a.item_bytes : ranks.data(buffer, r);
      put(a, from, first, a.widths[r], start, std::min(start + most, a.rows * a.widths[r]));
    }
    start += most;
  } while (start < longest);
  return true;
}

}  // namespace
}  // namespace oddrank

using namespace oddrank;

extern "C" {

// Returns once every rank is here. 0 where one is gone or does something else: see Ranks.
int32_t oddrank_meet(Ranks *ranks, uint64_t signature) { return meet(*ranks, signature); }

void oddrank_all_reduce(const AllReduceArguments *a) {
  if (!reduce_any(*a)) operation_failed = true;
}

void oddrank_gather_columns(const GatherColumnsArguments *a) {
  if (!gather_columns(*a)) operation_failed = true;
}

}  // extern "C"
