// pack: the Ascend C kernel's launcher; no torch, no Ascend header.
#pragma once

#include <cstdint>

namespace mdapo::pack {

// All int64. A field is (address of its source, address of its destination, bytes of a token), a piece is (to, from,
// count) as in pack.h.
constexpr int64_t kFieldNumbers = 3;
constexpr int64_t kPieceNumbers = 3;

struct AscendCopy {
  const int64_t* fields;  // on the device, [num_fields, 3]
  const int64_t* pieces;  // on the device, [num_pieces, 3]
  int64_t num_fields;
  int64_t num_pieces;
  int64_t tokens;  // of every destination
};

// Writes every byte of every field's destination once.
void launch_copy(const AscendCopy& job, uint32_t cores, void* stream);

}  // namespace mdapo::pack
