// The CPU's kernels without torch: what the library calls and the sanitizers run.
#pragma once

#include <cstring>

#include "pack/pack.h"

namespace mdapo::pack {

// One field: tokens of `item` bytes.
struct Field {
  const uint8_t* from;
  uint8_t* to;
  int64_t item;
};

// Writes destination tokens [begin, end) of every field, each byte once.
inline void copy_range(const std::vector<Field>& fields, const std::vector<Piece>& pieces, int64_t begin, int64_t end) {
  const auto count = static_cast<int64_t>(pieces.size());
  const int64_t first = first_piece(pieces.data(), count, begin);
  for (const Field& field : fields) {
    int64_t at = begin;
    for (int64_t i = first; i < count && pieces[i].to < end; ++i) {
      const Piece& piece = pieces[i];
      const int64_t from = std::max(piece.to, begin), to = std::min(piece.to + piece.count, end);
      if (from > at) std::memset(field.to + at * field.item, 0, static_cast<size_t>((from - at) * field.item));
      std::memcpy(field.to + from * field.item, field.from + (piece.from + from - piece.to) * field.item,
                  static_cast<size_t>((to - from) * field.item));
      at = to;
    }
    if (end > at) std::memset(field.to + at * field.item, 0, static_cast<size_t>((end - at) * field.item));
  }
}

// The run of ones in a row of `size` bytes that are 0 or 1: [*first, *end), both 0 where there is none. False when
// there are ones behind a gap.
inline bool mask_span(const uint8_t* row, int64_t size, int64_t* first, int64_t* end) {
  *first = *end = 0;
  const auto* one = size == 0 ? nullptr : static_cast<const uint8_t*>(std::memchr(row, 1, static_cast<size_t>(size)));
  if (one == nullptr) return true;
  *first = one - row;
  const auto* gap = static_cast<const uint8_t*>(std::memchr(one, 0, static_cast<size_t>(size - *first)));
  if (gap == nullptr) {
    *end = size;
    return true;
  }
  *end = gap - row;
  return std::memchr(gap, 1, static_cast<size_t>(size - *end)) == nullptr;
}

}  // namespace mdapo::pack
