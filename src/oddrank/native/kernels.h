// The kernels, over the vectors and the decoders of one level; included once by each level's file, which defines before
//
//   Vec, WIDTH          a vector of fp32 and how many; load, store, zero, set1, add, mul, fma(a, b, c) = a * b + c, sum
//   Bf16, Half, E4m3, Nvfp4, Mxfp4, Int4<columns of a scale>, Int8<columns, whether zeros>, Mxfp8
//                       the decoders
//
// A decoder takes a row a group at a time: GROUP columns in BYTES bytes become GROUP / WIDTH vectors, unscaled, given to
// `take` as they are made: more than two or three are never alive, for the sake of registers. Which column a lane of a
// vector is of is up to it: column(i) tells for the i-th number of a group. KIND says where scales are: PLAIN none;
// SEGMENT one for a run of columns that is a multiple of GROUP; LANES in vectors, each for GROUP / WIDTH / SCALES vectors
// of the group. UNIT and OF_X, powers of two, multiply what it decodes: one with the scales, the other with x when it is
// arranged. `Seen` collects codes that stand for NaN where decoding does not make a NaN of them; one in a row makes the
// row's products NaN. It also takes what the scales say of the values (zero points): those of a group are read first.
//
// Everything is in an unnamed namespace: levels are compiled with different flags and must not share instances.
#include <cmath>
#include <cstring>

#define INLINE __attribute__((always_inline))

namespace oddrank {
namespace {

enum Kind { PLAIN, SEGMENT, LANES };

constexpr int TILE = 512;  // columns decoded at a time for several x: a multiple of every group
constexpr int ROWS = 4;    // rows decoded together
constexpr int ACROSS = 3;  // x at a time: ROWS * ACROSS sums, as many x and the weights are in registers
constexpr int BLOCK = 16;  // rows that take a tile of x before the next one
constexpr int BATCH = 24;  // x in one pass over the rows

template <class F>
int64_t groups(int64_t k) {
  return (k + F::GROUP - 1) / F::GROUP;
}

// Group g of a row, from a padded copy where the row ends in it.
template <class F>
struct RowReader {
  const uint8_t *values, *scales;
  int64_t full;  // groups that are whole
  alignas(64) uint8_t last[F::BYTES];
  uint8_t last_scales[32];

  RowReader(const Matrix &a, int64_t row) {
    values = a.values + row * a.row_bytes;
    full = a.k / F::GROUP;
    scales = nullptr;
    if constexpr (F::KIND == LANES) scales = a.scales + row * a.scale_row;
    if (full * F::GROUP < a.k) {
      const int64_t done = full * F::BYTES;
      std::memset(last, 0, sizeof last);
      std::memcpy(last, values + done, a.row_bytes - done);
      if constexpr (F::KIND == LANES) {
        const int64_t read = full * F::SCALE_BYTES;
        std::memset(last_scales, 0, sizeof last_scales);
        std::memcpy(last_scales, scales + read, a.scale_row - read);
      }
    }
  }
  const uint8_t *group(int64_t g) const { return g < full ? values + g * F::BYTES : last; }
  const uint8_t *scale(int64_t g) const { return g < full ? scales + g * F::SCALE_BYTES : last_scales; }
};

// The scales of a row's segments.
inline const float *segment_scales(const Matrix &a, int64_t row) {
  return reinterpret_cast<const float *>(a.scales) + (a.block_n ? row / a.block_n : 0) * a.scale_row;
}

// One row times one x.
template <class F>
float product(const Matrix &a, int64_t row, const float *x) {
  constexpr int V = F::GROUP / WIDTH;
  const RowReader<F> reader(a, row);
  const int64_t count = groups<F>(a.k);
  typename F::Seen seen;
  float total;
  if constexpr (F::KIND == PLAIN) {
    constexpr int CHAINS = V >= 8 ? V : 8;  // sums that do not wait for each other
    Vec sums[CHAINS];
    for (auto &s : sums) s = zero();
    int64_t g = 0;
    for (; g + CHAINS / V <= reader.full; g += CHAINS / V) {
#pragma GCC unroll 8
      for (int u = 0; u < CHAINS / V; u++) {  // unrolled, or the sums are in memory
        const uint8_t *p = reader.values + (g + u) * F::BYTES;
        const float *at = x + (g + u) * F::GROUP;
        fetch(p + AHEAD);
        F::decode(p, seen, [&](int j, Vec w) INLINE { sums[u * V + j] = fma(w, load(at + j * WIDTH), sums[u * V + j]); });
      }
    }
    for (; g < count; g++) {
      const float *at = x + g * F::GROUP;
      F::decode(reader.group(g), seen, [&](int j, Vec w) INLINE { sums[j] = fma(w, load(at + j * WIDTH), sums[j]); });
    }
    for (int step = CHAINS / 2; step; step /= 2)
      for (int j = 0; j < step; j++) sums[j] = add(sums[j], sums[j + step]);
    total = sum(sums[0]) * a.factor;
  } else if constexpr (F::KIND == SEGMENT) {
    const int64_t each = a.block_k ? a.block_k / F::GROUP : count;
    const float *scales = segment_scales(a, row);
    const float unit = a.factor * F::UNIT;
    Vec all[V];
    for (auto &s : all) s = zero();
    const uint8_t *p = reader.values;
    int64_t g = 0, segment = 0;
    for (; g + each <= reader.full; segment++) {
      Vec part[V];
      for (auto &s : part) s = zero();
      const int64_t end = g + each;
      for (; g + 4 <= end; g += 4) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++, p += F::BYTES, x += F::GROUP) {
          if (u * F::BYTES % 64 == 0) fetch(p + AHEAD);
          F::decode(p, seen, [&](int j, Vec w) INLINE { part[j] = fma(w, load(x + j * WIDTH), part[j]); });
        }
      }
      for (; g < end; g++, p += F::BYTES, x += F::GROUP)
        F::decode(p, seen, [&](int j, Vec w) INLINE { part[j] = fma(w, load(x + j * WIDTH), part[j]); });
      const Vec scale = set1(scales[segment] * unit);
      for (int j = 0; j < V; j++) all[j] = fma(part[j], scale, all[j]);
    }
    if (g < count) {  // a segment that is not whole, and is the last
      const Vec scale = set1(scales[segment] * unit);
      for (; g < count; g++, x += F::GROUP)
        F::decode(reader.group(g), seen,
                  [&](int j, Vec w) INLINE { all[j] = fma(mul(w, scale), load(x + j * WIDTH), all[j]); });
    }
    for (int step = V / 2; step; step /= 2)
      for (int j = 0; j < step; j++) all[j] = add(all[j], all[j + step]);
    total = sum(all[0]);
  } else {
    constexpr int EACH = V / F::SCALES;
    const Vec none = set1(1.0f);
    Vec all = zero();
    auto one = [&](const uint8_t *p, const uint8_t *s, const float *at) INLINE {
      Vec scale[F::SCALES], part = zero();
      F::scales(s, none, scale, seen);
      F::decode(p, seen, [&](int j, Vec w) INLINE {
        const Vec v = load(at + j * WIDTH);
        part = j % EACH ? fma(w, v, part) : mul(w, v);
        if (j % EACH == EACH - 1) all = fma(part, scale[j / EACH], all);
      });
    };
    int64_t g = 0;
    for (; g < reader.full; g++) {
      const uint8_t *p = reader.values + g * F::BYTES;
      fetch(p + AHEAD);
      one(p, reader.scales + g * F::SCALE_BYTES, x + g * F::GROUP);
    }
    if (g < count) one(reader.last, reader.last_scales, x + g * F::GROUP);
    total = sum(all) * (a.factor * F::UNIT);
  }
  return F::bad(seen) ? NAN : total;
}

// Groups [begin, end) of a row, scaled. True where a code for NaN was among them.
template <class F>
inline bool decode_groups(const Matrix &a, const RowReader<F> &reader, int64_t row, int64_t begin, int64_t end,
                          float *out) {
  constexpr int V = F::GROUP / WIDTH;
  typename F::Seen seen;
  const Vec factor = set1(a.factor * F::UNIT);
  const Vec none = zero();  // subnormal numbers are slow to multiply and fast to multiply and add
  Vec scale[F::SCALES];
  const auto one = [&](const uint8_t *p) INLINE {
    F::decode(p, seen, [&](int j, Vec w) INLINE { store(out + j * WIDTH, fma(w, scale[j / (V / F::SCALES)], none)); });
    out += F::GROUP;
  };
  const int64_t ahead = ROWS * a.row_bytes;  // the same columns of the rows after these
  const uint8_t *p = reader.values + begin * F::BYTES;
  const int64_t whole = end < reader.full ? end : reader.full;
  int64_t g = begin;
  if constexpr (F::KIND == LANES) {
    for (; g < whole; g++, p += F::BYTES) {
      fetch(p + ahead);
      F::scales(reader.scale(g), factor, scale, seen);
      one(p);
    }
    if (g < end) {
      F::scales(reader.last_scales, factor, scale, seen);
      one(reader.last);
    }
  } else {
    const bool segments = F::KIND == SEGMENT;
    const int64_t each = segments && a.block_k ? a.block_k / F::GROUP : groups<F>(a.k);
    const float *scales = segments ? segment_scales(a, row) : nullptr;
    scale[0] = factor;
    for (int64_t segment = g / each; g < end; segment++) {
      if constexpr (F::KIND == SEGMENT) scale[0] = mul(set1(scales[segment]), factor);
      const int64_t next = (segment + 1) * each, stop = next < whole ? next : whole;
      for (; g + 2 <= stop; g += 2, p += 2 * F::BYTES) {
        fetch(p + ahead);
        one(p);
        one(p + F::BYTES);
      }
      for (; g < stop; g++, p += F::BYTES) one(p);
      if (g == reader.full && g < end && g < next) {
        one(reader.last);
        g++;
      }
    }
  }
  return F::bad(seen);
}

// Adds N x times a tile of decoded weights, from column t on, to the sums.
template <int N>
inline INLINE void tile_product(const float (&w)[ROWS][TILE], const float *const *x, int64_t t, int64_t columns,
                                Vec (*sums)[ROWS]) {
  Vec s[N][ROWS];
  const float *at[N];
  for (int b = 0; b < N; b++) {
    at[b] = x[b] + t;
    for (int r = 0; r < ROWS; r++) s[b][r] = sums[b][r];
  }
  for (int64_t c = 0; c < columns; c += WIDTH) {
    Vec v[N];
    for (int b = 0; b < N; b++) v[b] = load(at[b] + c);
    for (int r = 0; r < ROWS; r++) {
      const Vec weights = load(&w[r][c]);
      for (int b = 0; b < N; b++) s[b][r] = fma(weights, v[b], s[b][r]);
    }
  }
  for (int b = 0; b < N; b++)
    for (int r = 0; r < ROWS; r++) sums[b][r] = s[b][r];
}

// Up to BLOCK rows times up to BATCH x. A tile of x is used by all the rows before the next one: it stays in the first
// cache, beside that of the weights.
template <class F>
void block_product(const Matrix &a, int64_t row, int rows, const float *const *x, int64_t m, float *y, int64_t stride) {
  alignas(64) float w[ROWS][TILE];
  Vec sums[BLOCK / ROWS][BATCH][ROWS];
  bool bad[BLOCK] = {};
  const int64_t width = groups<F>(a.k) * F::GROUP;
  for (int q = 0; q * ROWS < rows; q++)
    for (int64_t b = 0; b < m; b++)
      for (auto &s : sums[q][b]) s = zero();
  if (rows % ROWS) std::memset(w, 0, sizeof w);
  for (int64_t t = 0; t < width; t += TILE) {
    const int64_t columns = width - t < TILE ? width - t : TILE;
    for (int q = 0; q * ROWS < rows; q++) {
      for (int r = q * ROWS; r < rows && r < (q + 1) * ROWS; r++) {
        const RowReader<F> reader(a, row + r);
        bad[r] |= decode_groups<F>(a, reader, row + r, t / F::GROUP, (t + columns) / F::GROUP, w[r % ROWS]);
      }
      int64_t b = 0;
      for (; b + ACROSS <= m; b += ACROSS) tile_product<ACROSS>(w, x + b, t, columns, sums[q] + b);
      if (m - b == 2) tile_product<2>(w, x + b, t, columns, sums[q] + b);
      if (m - b == 1) tile_product<1>(w, x + b, t, columns, sums[q] + b);
    }
  }
  for (int64_t b = 0; b < m; b++)
    for (int r = 0; r < rows; r++) y[b * stride + r] = bad[r] ? NAN : sum(sums[r / ROWS][b][r % ROWS]);
}

template <class F>
void multiply_as(const Matrix &a, const float *const *x, int64_t m, int64_t begin, int64_t end, float *y,
                 int64_t stride) {
  if (m == 1) {
    for (int64_t row = begin; row < end; row++) y[row - begin] = product<F>(a, row, x[0]);
    return;
  }
  for (int64_t b = 0; b < m; b += BATCH) {
    const int64_t some = m - b < BATCH ? m - b : BATCH;
    for (int64_t row = begin; row < end; row += BLOCK) {
      const int rows = end - row < BLOCK ? int(end - row) : BLOCK;
      block_product<F>(a, row, rows, x + b, some, y + b * stride + row - begin, stride);
    }
  }
}

template <class F>
void arrange_as(const float *x, int64_t k, float *out) {
  struct Order {
    int at[F::GROUP];
    Order() {
      for (int i = 0; i < F::GROUP; i++) at[i] = F::column(i);
    }
  };
  static const Order order;
  const int64_t full = k / F::GROUP;
  for (int64_t g = 0; g < full; g++)
    for (int i = 0; i < F::GROUP; i++) out[g * F::GROUP + i] = x[g * F::GROUP + order.at[i]] * F::OF_X;
  const int64_t left = k - full * F::GROUP;
  if (left == 0) return;
  for (int i = 0; i < F::GROUP; i++)
    out[full * F::GROUP + i] = order.at[i] < left ? x[full * F::GROUP + order.at[i]] * F::OF_X : 0.0f;
}

// Calls f with a value of the decoder's type.
template <class Call>
void with_format(const Matrix &a, Call f) {
  switch (a.format) {
    case BF16: return f(Bf16());
    case F16: return f(Half());
    case E4M3: return f(E4m3());
    case NVFP4: return f(Nvfp4());
    case MXFP4: return f(Mxfp4());
    case INT4: return a.block_k == 32 ? f(Int4<32>()) : a.block_k == 64 ? f(Int4<64>()) : f(Int4<128>());
    case MXFP8: return f(Mxfp8());
    case INT8:
      return a.block_k == 32 ? f(Int8<32, false>()) : a.block_k == 64 ? f(Int8<64, false>()) : f(Int8<128, false>());
    case INT8_ZEROS:
      return a.block_k == 32 ? f(Int8<32, true>()) : a.block_k == 64 ? f(Int8<64, true>()) : f(Int8<128, true>());
  }
}

int64_t arranged(const Matrix &a) {
  int64_t found = 0;
  with_format(a, [&](auto f) { found = groups<decltype(f)>(a.k) * decltype(f)::GROUP * 4; });
  return found;
}

void arrange(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out) {
  with_format(a, [&](auto f) {
    const int64_t bytes = arranged(a);
    for (int64_t b = 0; b < m; b++)
      arrange_as<decltype(f)>(x + b * stride, a.k, reinterpret_cast<float *>(out + b * bytes));
  });
}

void multiply(const Matrix &a, const uint8_t *const *x, int64_t m, int64_t begin, int64_t end, float *y,
              int64_t stride) {
  const float *const *numbers = reinterpret_cast<const float *const *>(x);
  with_format(a, [&](auto f) { multiply_as<decltype(f)>(a, numbers, m, begin, end, y, stride); });
}

}  // namespace
}  // namespace oddrank
