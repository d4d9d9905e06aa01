// Where keys and values lie. Python fills it through ctypes: keep native/pages.py alike.
#pragma once
#include <cstdint>

namespace oddrank {

enum Number : int32_t { AS_BF16 = 0, AS_F16 = 1, AS_F32 = 2 };

// The key of a sequence's token at `position` for KV head h is, in numbers, at
//   page * page_stride + h * head_stride + position % page_size * dim
// behind `keys`, page being table[slot * table_row + position / page_size]; where table is null a slot has one page, of its
// own number. Values lie alike.
struct Pages {
  void *keys, *values;
  const int64_t *table;
  int64_t table_row;
  int64_t page_size, page_stride, head_stride;
  int64_t dim;
  int32_t number;
};

namespace {

inline int64_t page_of(const Pages &p, int64_t slot, int64_t position) {
  return p.table ? p.table[slot * p.table_row + position / p.page_size] : slot;
}

inline int64_t bytes_of(const Pages &p) { return p.number == AS_F32 ? 4 : 2; }

inline uint8_t *row_of(const Pages &p, void *all, int64_t slot, int64_t head, int64_t position) {
  const int64_t within = p.table ? position % p.page_size : position;
  const int64_t at = page_of(p, slot, position) * p.page_stride + head * p.head_stride + within * p.dim;
  return static_cast<uint8_t *>(all) + at * bytes_of(p);
}

}  // namespace
}  // namespace oddrank
