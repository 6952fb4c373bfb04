// The CPU's kernels without torch: what the library calls and the sanitizers run.
#pragma once

#include <cstring>

#include "common/stream.h"
#include "pack/pack.h"

namespace mdapo::pack {

// One field: tokens of `item` bytes.
struct Field {
  const uint8_t* from;
  uint8_t* to;
  int64_t item;
};

// Writes destination tokens [begin, end) of every field, each byte once; `stream`: past the cache.
inline void copy_range(const std::vector<Field>& fields, const std::vector<Piece>& pieces, int64_t begin, int64_t end,
                       bool stream) {
  const auto count = static_cast<int64_t>(pieces.size());
  const int64_t first = first_piece(pieces.data(), count, begin);
  for (const Field& field : fields) {
    const int64_t item = field.item;
    const auto zeros = [&](int64_t from, int64_t to) {
      uint8_t* at = field.to + from * item;
      stream ? stream_zeros(at, (to - from) * item) : void(std::memset(at, 0, static_cast<size_t>((to - from) * item)));
    };
    int64_t at = begin;
    for (int64_t i = first; i < count && pieces[i].to < end; ++i) {
      const Piece& piece = pieces[i];
      const int64_t from = std::max(piece.to, begin), to = std::min(piece.to + piece.count, end);
      if (from > at) zeros(at, from);
      const uint8_t* source = field.from + (piece.from + from - piece.to) * item;
      if (stream) {
        const Piece& next = pieces[std::min(i + 1, count - 1)];
        stream_copy(field.to + from * item, source, (to - from) * item, field.from + next.from * item,
                    next.count * item);
      } else {
        std::memcpy(field.to + from * item, source, static_cast<size_t>((to - from) * item));
      }
      at = to;
    }
    if (end > at) zeros(at, end);
  }
  if (stream) stream_fence();
}

// Ones in a row of `size` bytes that are 0 or 1: the first, and the end of the last, both 0 where there is none.
// Returns whether zeros lie between them.
inline bool mask_span(const uint8_t* row, int64_t size, int64_t* first, int64_t* end) {
  const auto find = [row, size](int64_t from, int value) {
    const auto* found = from == size ? nullptr : std::memchr(row + from, value, static_cast<size_t>(size - from));
    return found == nullptr ? size : static_cast<const uint8_t*>(found) - row;
  };
  *first = *end = 0;
  const int64_t one = find(0, 1);
  if (one == size) return false;
  *first = one;
  *end = find(one, 0);
  if (find(*end, 1) == size) return false;
  for (*end = size; row[*end - 1] == 0;) --*end;
  return true;
}

}  // namespace mdapo::pack
