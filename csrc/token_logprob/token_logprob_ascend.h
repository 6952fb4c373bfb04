// token_logprob: the Ascend C kernels' launchers; no torch, no Ascend header.
#pragma once

#include "token_logprob/token_logprob_tile.h"

namespace mdapo::token_logprob {

// A tile on the device. `values` are the stats or the terms of its rows, float32.
struct AscendTile {
  Tile tile;
  bool bfloat16;  // else float32
  void* logits;
  const int64_t* targets;
  void* values;
  int64_t value_stride;  // elements from one kind of value to the next
  float scale;           // 1 / temperature
};

// Merges the tile into the stats of its rows.
void launch_stats(const AscendTile& job, uint32_t cores, void* stream);

// Turns the logits into the loss's gradient by them, in place; `values` are the terms.
void launch_gradient(const AscendTile& job, uint32_t cores, void* stream);

}  // namespace mdapo::token_logprob
