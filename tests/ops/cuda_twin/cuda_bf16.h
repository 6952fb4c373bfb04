// The host twin's bfloat16, for the kernels that include <cuda_bf16.h>.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 v) {
  const uint32_t wide = static_cast<uint32_t>(v.bits) << 16;
  float f;
  std::memcpy(&f, &wide, sizeof f);
  return f;
}

// To nearest, ties to even; every NaN becomes 0x7fff, as on the device.
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
