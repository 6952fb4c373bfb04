// What rows with common beginnings cost when each of these is laid out once: the size of a prefix tree, which is not
// built. Pure C++17, on the host whatever the device; mdapo/ops/prefix.py says what is computed and has it in Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace mdapo::prefix {

constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;  // of a bundle's rows: their squares add up to less than 2^62

// N rows in P tokens, in B bundles: row i is `lengths[i]` tokens from ids[starts[i]] on, bundle b ends before ends[b].
struct Batch {
  const int32_t* ids;
  int64_t tokens;
  const int64_t* starts;
  const int64_t* lengths;
  int64_t rows;
  const int64_t* ends;
  int64_t bundles;
};

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

// Throws std::invalid_argument.
inline void require_valid(const Batch& batch, int64_t least) {
  require(least >= 1, "least: at least 1");
  for (int64_t i = 0; i < batch.rows; ++i) {
    require(batch.lengths[i] >= 1 && batch.lengths[i] <= batch.tokens, "lengths: from 1 token to all of them");
    require(batch.starts[i] >= 0 && batch.starts[i] <= batch.tokens - batch.lengths[i], "starts: a row is not in ids");
  }
  int64_t row = 0;
  for (int64_t b = 0; b < batch.bundles; ++b) {
    require(batch.ends[b] >= row && batch.ends[b] <= batch.rows, "ends: they rise from 0 to the number of rows");
    int64_t sum = 0;
    for (; row < batch.ends[b]; ++row) {
      require((sum += batch.lengths[row]) <= kMaxTokens, "a bundle of more than 2^31 - 1 tokens");
    }
  }
  require(row == batch.rows, "ends: they rise from 0 to the number of rows");
}

// Tokens from the first on that two rows have in common.
inline int64_t common(const Batch& batch, int64_t a, int64_t b) {
  constexpr int64_t kBlock = 64;
  const int32_t *left = batch.ids + batch.starts[a], *right = batch.ids + batch.starts[b];
  const int64_t end = std::min(batch.lengths[a], batch.lengths[b]);
  int64_t at = 0;
  while (at + kBlock <= end && std::memcmp(left + at, right + at, kBlock * sizeof(int32_t)) == 0) at += kBlock;
  while (at < end && left[at] == right[at]) ++at;
  return at;
}

// Rows by their ids, as words in a dictionary; equal ones by number.
inline bool before(const Batch& batch, int64_t a, int64_t b) {
  const int64_t same = common(batch, a, b);
  if (same < batch.lengths[a] && same < batch.lengths[b]) {
    return batch.ids[batch.starts[a] + same] < batch.ids[batch.starts[b] + same];
  }
  return batch.lengths[a] != batch.lengths[b] ? batch.lengths[a] < batch.lengths[b] : a < b;
}

struct Size {
  int64_t tokens = 0, squares = 0;
};

// What the tree saves of `rows` rows of which neighbours have shared[1], ..., shared[rows - 1] tokens in common.
//
// Rows that agree furthest lie side by side, so a run of rows has the least of its `shared` in common. That ends a node
// if it is `least` tokens further on than the node above; else the rows go on, each with its own copy of them.
inline Size saved(const std::vector<int64_t>& shared, int64_t rows, int64_t least) {
  struct Run {
    int64_t first, last, begin;  // rows, and the tokens that the nodes above have
  };
  Size size;
  std::vector<Run> waiting{{0, rows, 0}};
  while (!waiting.empty()) {
    const Run run = waiting.back();
    waiting.pop_back();
    if (run.last - run.first < 2) continue;
    const int64_t end = *std::min_element(shared.begin() + run.first + 1, shared.begin() + run.last);
    const int64_t begin = end - run.begin >= least ? end : run.begin;
    int64_t first = run.first;
    for (int64_t i = run.first + 1; i <= run.last; ++i) {
      if (i < run.last && shared[i] != end) continue;
      waiting.push_back({first, i, begin});
      if (i == run.last) break;
      size.tokens += begin;
      size.squares += begin * begin;
      first = i;
    }
  }
  return size;
}

// Bundle b: its rows in their order, into order[first row .. ends[b] - 1], and what their tree has.
inline Size measure(const Batch& batch, int64_t b, int64_t least, int64_t* order) {
  const int64_t first = b == 0 ? 0 : batch.ends[b - 1], rows = batch.ends[b] - first;
  int64_t* own = order + first;
  for (int64_t i = 0; i < rows; ++i) own[i] = first + i;
  std::sort(own, own + rows, [&](int64_t x, int64_t y) { return before(batch, x, y); });
  std::vector<int64_t> shared(static_cast<size_t>(rows));
  Size size;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t length = batch.lengths[own[i]];
    size.tokens += length;
    size.squares += length * length;
    // A row's last token is its own.
    if (i > 0) shared[i] = std::min({common(batch, own[i - 1], own[i]), length - 1, batch.lengths[own[i - 1]] - 1});
  }
  const Size less = saved(shared, rows, least);
  return {size.tokens - less.tokens, size.squares - less.squares};
}

}  // namespace mdapo::prefix
