// token_logprob: the CUDA kernels' launchers; no torch.
#pragma once

#include <cuda_runtime.h>

#include "token_logprob/token_logprob.h"

namespace mdapo::token_logprob {

enum class Dtype { kFloat32, kBfloat16, kFloat64 };

// A tile on the device. `values` are the stats or the terms of its rows: float64 for float64 logits, else float32.
struct DeviceTile {
  Tile tile;
  Dtype dtype;
  void* logits;
  const int64_t* targets;
  void* values;
  int64_t value_stride;  // elements from one kind of value to the next
  double temperature;
};

// Merges the tile into the stats of its rows.
cudaError_t launch_stats(const DeviceTile& job, cudaStream_t stream);

// Turns the logits into the loss's gradient by them, in place; `values` are the terms.
cudaError_t launch_gradient(const DeviceTile& job, cudaStream_t stream);

}  // namespace mdapo::token_logprob
