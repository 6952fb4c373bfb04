// The CUDA kernels' launchers; no torch.
#pragma once

#include <cuda_runtime.h>

#include "pack/pack.h"

namespace mdapo::pack {

constexpr int kMaxFields = 16;            // of one launch
constexpr int kTileBytes = 256 * 16 * 4;  // of a block's output: 256 threads, 16-byte words, 4 each

// One field: tokens of `item` bytes, below 2^31. `to` is 16-byte aligned; `from` need not be.
struct DeviceField {
  const uint8_t* from;
  uint8_t* to;
  int64_t from_bytes;
  int64_t to_bytes;
  uint32_t item;
  uint32_t first_block;  // the field's blocks begin here
};

struct CopyJob {
  DeviceField fields[kMaxFields];
  int num_fields;
  uint32_t num_blocks;
  const Piece* pieces;  // on the device
  int64_t num_pieces;
};

// Writes every byte of every field's destination once, in one launch.
cudaError_t launch_copy(const CopyJob& job, cudaStream_t stream);

// spans int64 [3, rows] of mask [rows, size], bytes of 0 or 1: first one, end of the last one, 1 if zeros lie between.
cudaError_t launch_mask_spans(const uint8_t* mask, int64_t* spans, int64_t rows, int64_t size, cudaStream_t stream);

}  // namespace mdapo::pack
