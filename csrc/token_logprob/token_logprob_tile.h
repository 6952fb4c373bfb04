// token_logprob: a tile of logits and its index maths; nothing of the standard library but fixed-width integers, so
// that Ascend C kernels share it too.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace mdapo::token_logprob {

struct Tile {
  int64_t rows;
  int64_t cols;
  int64_t row_stride;  // elements from one row of logits to the next, >= cols
  int64_t first_id;    // the id that column 0 stands for, >= 0
};

// Rows of the two tensors that hold a few numbers for each scored token, [4, R] and [5, R].
enum StatsRow : int { kLargest, kSum, kMoment, kTarget, kStatsRows };
enum TermsRow : int { kBase, kLogSum, kEntropy, kGradLogp, kGradEntropy, kTermsRows };

// 64 bits throughout: rows times vocabulary passes 2^31 at 16384 rows.
MDAPO_HOST_DEVICE int64_t row_offset(const Tile& tile, int64_t row) { return row * tile.row_stride; }

// The column of an id, or -1 where the tile does not hold it. Any 64-bit id is allowed: nothing overflows.
MDAPO_HOST_DEVICE int64_t column_of(const Tile& tile, int64_t id) {
  if (id < tile.first_id || id - tile.first_id >= tile.cols) return -1;
  return id - tile.first_id;
}

// Where exp(d) counts as 0: finite, so that exp(d) * d is 0 too for d = -inf, and still a normal number's exponent.
template <class A>
MDAPO_HOST_DEVICE constexpr A lowest() {
  return sizeof(A) == 8 ? A(-700) : A(-86);
}

}  // namespace mdapo::token_logprob
