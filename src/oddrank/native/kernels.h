// The kernels, over the vectors and the decoders of one level; included once by each level's file, which defines before
//
//   Vec, WIDTH          a vector of fp32 and how many; load, store, zero, set1, add, mul, fma(a, b, c) = a * b + c, sum
//   Bf16, Half, E4m3, Nvfp4, Mxfp4    the decoders
//
// A decoder takes a row a group at a time: GROUP columns in BYTES bytes become GROUP / WIDTH vectors, unscaled, given to
// `take` as they are made: more than two or three are never alive, for the sake of registers. Which column a lane of a
// vector is of is up to it: column(i) tells for the i-th number of a group. KIND says where scales are: PLAIN none;
// SEGMENT one for a run of columns that is a multiple of GROUP; LANES in vectors, each for GROUP / WIDTH / SCALES vectors
// of the group. UNIT and OF_X, powers of two, multiply what it decodes: one with the scales, the other with x when it is
// arranged. `Seen` collects codes that stand for NaN where decoding does not make a NaN of them; one in a row makes the
// row's products NaN.
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
constexpr int ACROSS = 3;  // x at a time: ROWS * ACROSS sums, ROWS weights and an x are in registers
constexpr int BATCH = 48;  // x in one pass over the rows

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
  uint8_t last_scales[16];

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
      for (int u = 0; u < CHAINS / V; u++) {
        const uint8_t *p = reader.values + (g + u) * F::BYTES;
        const float *at = x + (g + u) * F::GROUP;
        prefetch(p);
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
    Vec all = zero();
    for (int64_t g = 0, segment = 0; g < count; segment++) {
      const int64_t end = g + each < count ? g + each : count;
      const int64_t whole = end < reader.full ? end : reader.full;
      Vec part[V];
      for (auto &p : part) p = zero();
      const float *at = x + g * F::GROUP;
      auto take = [&](int j, Vec w) INLINE { part[j] = fma(w, load(at + j * WIDTH), part[j]); };
      for (; g < whole; g++, at += F::GROUP) {
        const uint8_t *p = reader.values + g * F::BYTES;
        prefetch(p);
        F::decode(p, seen, take);
      }
      for (; g < end; g++, at += F::GROUP) F::decode(reader.last, seen, take);
      for (int step = V / 2; step; step /= 2)
        for (int j = 0; j < step; j++) part[j] = add(part[j], part[j + step]);
      all = fma(part[0], set1(scales[segment] * unit), all);
    }
    total = sum(all);
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
      prefetch(p);
      one(p, reader.scales + g * F::SCALE_BYTES, x + g * F::GROUP);
    }
    if (g < count) one(reader.last, reader.last_scales, x + g * F::GROUP);
    total = sum(all) * (a.factor * F::UNIT);
  }
  return F::bad(seen) ? NAN : total;
}

// Groups [begin, end) of a row, scaled. True where a code for NaN was among them.
template <class F>
bool decode_groups(const Matrix &a, const RowReader<F> &reader, int64_t row, int64_t begin, int64_t end, float *out) {
  constexpr int V = F::GROUP / WIDTH;
  typename F::Seen seen;
  const Vec factor = set1(a.factor * F::UNIT);
  const int64_t each = F::KIND == SEGMENT ? (a.block_k ? a.block_k / F::GROUP : groups<F>(a.k)) : 0;
  int64_t segment = each ? begin / each : 0, left = each ? (segment + 1) * each - begin : 0;
  const float *scales = F::KIND == SEGMENT ? segment_scales(a, row) : nullptr;
  Vec scale[F::SCALES];
  if constexpr (F::KIND == PLAIN) scale[0] = factor;
  if constexpr (F::KIND == SEGMENT) scale[0] = mul(set1(scales[segment]), factor);
  for (int64_t g = begin; g < end; g++) {
    const uint8_t *p = reader.group(g);
    prefetch(p);
    if constexpr (F::KIND == LANES) F::scales(reader.scale(g), factor, scale, seen);
    if constexpr (F::KIND == SEGMENT) {
      if (left == 0) {
        scale[0] = mul(set1(scales[++segment]), factor);
        left = each;
      }
      left--;
    }
    float *to = out + (g - begin) * F::GROUP;
    F::decode(p, seen, [&](int j, Vec w) INLINE { store(to + j * WIDTH, mul(w, scale[j / (V / F::SCALES)])); });
  }
  return F::bad(seen);
}

template <int N>
inline INLINE void tile_product(const float (&w)[ROWS][TILE], const float *x, int64_t stride,
                                                        int64_t columns, Vec (*sums)[ROWS]) {
  Vec s[N][ROWS];
  for (int b = 0; b < N; b++)
    for (int r = 0; r < ROWS; r++) s[b][r] = sums[b][r];
  for (int64_t c = 0; c < columns; c += WIDTH) {
    Vec v[ROWS];
    for (int r = 0; r < ROWS; r++) v[r] = load(&w[r][c]);
    for (int b = 0; b < N; b++) {
      const Vec at = load(x + b * stride + c);
      for (int r = 0; r < ROWS; r++) s[b][r] = fma(v[r], at, s[b][r]);
    }
  }
  for (int b = 0; b < N; b++)
    for (int r = 0; r < ROWS; r++) sums[b][r] = s[b][r];
}

// Up to ROWS rows times up to BATCH x.
template <class F>
void block_product(const Matrix &a, int64_t row, int rows, const float *x, int64_t m, float *y, int64_t stride) {
  alignas(64) float w[ROWS][TILE];
  Vec sums[BATCH][ROWS];
  bool bad[ROWS] = {};
  const int64_t width = groups<F>(a.k) * F::GROUP;
  for (int64_t b = 0; b < m; b++)
    for (auto &s : sums[b]) s = zero();
  if (rows < ROWS) std::memset(w, 0, sizeof w);
  const int last = rows - 1;
  const RowReader<F> readers[ROWS] = {
      {a, row}, {a, row + (last < 1 ? last : 1)}, {a, row + (last < 2 ? last : 2)}, {a, row + (last < 3 ? last : 3)}};
  for (int64_t t = 0; t < width; t += TILE) {
    const int64_t columns = width - t < TILE ? width - t : TILE;
    for (int r = 0; r < rows; r++)
      bad[r] |= decode_groups<F>(a, readers[r], row + r, t / F::GROUP, (t + columns) / F::GROUP, w[r]);
    int64_t b = 0;
    for (; b + ACROSS <= m; b += ACROSS) tile_product<ACROSS>(w, x + b * width + t, width, columns, sums + b);
    if (m - b == 2) tile_product<2>(w, x + b * width + t, width, columns, sums + b);
    if (m - b == 1) tile_product<1>(w, x + b * width + t, width, columns, sums + b);
  }
  for (int64_t b = 0; b < m; b++)
    for (int r = 0; r < rows; r++) y[b * stride + r] = bad[r] ? NAN : sum(sums[b][r]);
}

template <class F>
void multiply_as(const Matrix &a, const float *x, int64_t m, int64_t begin, int64_t end, float *y, int64_t stride) {
  if (m == 1) {
    for (int64_t row = begin; row < end; row++) y[row - begin] = product<F>(a, row, x);
    return;
  }
  const int64_t width = groups<F>(a.k) * F::GROUP;
  for (int64_t b = 0; b < m; b += BATCH) {
    const int64_t some = m - b < BATCH ? m - b : BATCH;
    for (int64_t row = begin; row < end; row += ROWS) {
      const int rows = end - row < ROWS ? int(end - row) : ROWS;
      block_product<F>(a, row, rows, x + b * width, some, y + b * stride + row - begin, stride);
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
void with_format(int32_t format, Call f) {
  switch (format) {
    case BF16: return f(Bf16());
    case F16: return f(Half());
    case E4M3: return f(E4m3());
    case NVFP4: return f(Nvfp4());
    case MXFP4: return f(Mxfp4());
  }
}

int64_t arranged(const Matrix &a) {
  int64_t found = 0;
  with_format(a.format, [&](auto f) { found = groups<decltype(f)>(a.k) * decltype(f)::GROUP * 4; });
  return found;
}

void arrange(const Matrix &a, const float *x, int64_t m, int64_t stride, uint8_t *out) {
  with_format(a.format, [&](auto f) {
    const int64_t bytes = arranged(a);
    for (int64_t b = 0; b < m; b++)
      arrange_as<decltype(f)>(x + b * stride, a.k, reinterpret_cast<float *>(out + b * bytes));
  });
}

void multiply(const Matrix &a, const uint8_t *x, int64_t m, int64_t begin, int64_t end, float *y, int64_t stride) {
  const float *numbers = reinterpret_cast<const float *>(x);
  with_format(a.format, [&](auto f) { multiply_as<decltype(f)>(a, numbers, m, begin, end, y, stride); });
}

}  // namespace
}  // namespace oddrank
