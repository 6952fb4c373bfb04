// Ragged rows <-> packed segments: the index maths that all backends share. Pure C++17: no torch, no device.
//
// Both directions are a list of pieces, made on the host, that says for every token of the destination where it comes
// from. A kernel knows neither rows nor segments nor context parallelism: it copies pieces and writes zeros between
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/host_device.h"

namespace mdapo::pack {

// N runs of tokens, and the segment that each fills. A segment may be longer than its run: zeros follow.
struct Runs {
  const int64_t* row_start;  // [N] the run's first token, in the flat rows
  const int64_t* length;     // [N] its tokens
  const int64_t* begin;      // [N] its segment's first token, in the packed buffer of all context-parallel ranks
  const int64_t* span;       // [N] tokens of the segment; with cp > 1 a multiple of 2 * cp, as is begin
  int64_t count;             // N
};

// Context-parallel zig-zag: a segment is cut into 2 * cp chunks of equal size, rank r holds chunks r and 2 * cp - 1 -
// r.
struct Shard {
  int64_t cp = 1;
  int64_t rank = 0;
};

// Destination tokens [to, to + count) are source tokens [from, from + count).
struct Piece {
  int64_t to;
  int64_t from;
  int64_t count;
};

inline void require(bool holds, const char* what, int64_t run = -1) {
  if (!holds) {
    throw std::invalid_argument(run < 0 ? std::string(what) : "run " + std::to_string(run) + ": " + what);
  }
}

// Every run lies in the rows, every segment in the packed buffer, and both can be cut as the shard asks.
inline void check(const Runs& runs, Shard shard, int64_t rows, int64_t total) {
  require(shard.cp >= 1 && shard.rank >= 0 && shard.rank < shard.cp, "cp_rank is not one of cp ranks");
  require(rows >= 0 && total >= 0, "a size is negative");
  require(shard.cp <= INT32_MAX, "cp is too large");
  const int64_t chunks = shard.cp > 1 ? 2 * shard.cp : 1;
  require(total % chunks == 0, "the total is no multiple of 2 * cp");
  for (int64_t i = 0; i < runs.count; ++i) {
    const int64_t start = runs.row_start[i], length = runs.length[i], begin = runs.begin[i], span = runs.span[i];
    require(length >= 0 && start >= 0 && start <= rows - length, "lies outside the rows", i);
    require(span >= length, "is longer than its segment", i);
    require(begin >= 0 && begin <= total - span, "its segment lies outside the packed buffer", i);
    require(begin % chunks == 0 && span % chunks == 0, "its segment is no multiple of 2 * cp", i);
  }
}

// Calls piece(row token, packed token, count) for what the shard holds of run i; ascending in both.
template <class F>
inline void pieces_of(const Runs& runs, int64_t i, Shard shard, F&& piece) {
  const int64_t start = runs.row_start[i], length = runs.length[i];
  if (shard.cp == 1) {
    if (length > 0) piece(start, runs.begin[i], length);
    return;
  }
  const int64_t chunk = runs.span[i] / (2 * shard.cp), local = runs.begin[i] / shard.cp;
  const int64_t first = shard.rank * chunk, second = (2 * shard.cp - 1 - shard.rank) * chunk;
  const int64_t in_first = std::min(chunk, length - first), in_second = std::min(chunk, length - second);
  if (in_first > 0) piece(start + first, local, in_first);
  if (in_second > 0) piece(start + second, local + chunk, in_second);
}

// The runs' order by `key`, and an error where destinations overlap.
inline std::vector<int64_t> ordered(const Runs& runs, const int64_t* key, const int64_t* size) {
  std::vector<int64_t> order(static_cast<size_t>(runs.count));
  std::iota(order.begin(), order.end(), int64_t{0});
  if (!std::is_sorted(key, key + runs.count)) {
    std::stable_sort(order.begin(), order.end(), [key](int64_t a, int64_t b) { return key[a] < key[b]; });
  }
  int64_t end = 0;
  for (const int64_t i : order) {
    if (size[i] == 0) continue;
    require(key[i] >= end, "overlaps another", i);
    end = key[i] + size[i];
  }
  return order;
}

// What one shard's packed buffer of total / cp tokens takes from the rows. Throws std::invalid_argument.
inline std::vector<Piece> to_packed(const Runs& runs, Shard shard, int64_t rows, int64_t total) {
  check(runs, shard, rows, total);
  std::vector<Piece> pieces;
  pieces.reserve(static_cast<size_t>(runs.count) * (shard.cp > 1 ? 2 : 1));
  for (const int64_t i : ordered(runs, runs.begin, runs.span)) {
    pieces_of(runs, i, shard, [&](int64_t row, int64_t at, int64_t count) { pieces.push_back({at, row, count}); });
  }
  return pieces;
}

// What the rows take from one shard's packed buffer; zeros where no run is, and where other shards have it.
inline std::vector<Piece> to_rows(const Runs& runs, Shard shard, int64_t rows, int64_t total) {
  check(runs, shard, rows, total);
  std::vector<Piece> pieces;
  pieces.reserve(static_cast<size_t>(runs.count) * (shard.cp > 1 ? 2 : 1));
  for (const int64_t i : ordered(runs, runs.row_start, runs.length)) {
    pieces_of(runs, i, shard, [&](int64_t row, int64_t at, int64_t count) { pieces.push_back({row, at, count}); });
  }
  return pieces;
}

// The first of `count` pieces that ends behind `token`.
MDAPO_HOST_DEVICE int64_t first_piece(const Piece* pieces, int64_t count, int64_t token) {
  int64_t low = 0;
  while (low < count) {
    const int64_t middle = low + (count - low) / 2;
    if (pieces[middle].to + pieces[middle].count > token) {
      count = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace mdapo::pack
