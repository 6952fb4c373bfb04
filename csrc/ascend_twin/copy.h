// DataCopyPad: bytes between GM and UB, in blocks that need not be multiples of 32 bytes.
#pragma once

#include "tensors.h"

namespace AscendC {

struct DataCopyExtParams {
  uint16_t blockCount;
  uint32_t blockLen;   // bytes
  uint32_t srcStride;  // from the end of a block to the next: bytes in GM, blocks of 32 bytes in UB
  uint32_t dstStride;
  uint32_t rsv;
};

template <class T>
struct DataCopyPadExtParams {
  bool isPad;
  uint8_t leftPadding;  // elements
  uint8_t rightPadding;
  T paddingValue;
};

inline void check_copy(const DataCopyExtParams& params, size_t element) {
  using ascend_twin::require;
  require(params.blockCount >= 1 && params.blockCount <= 4095, "DataCopyPad: blockCount is not in 1 to 4095");
  require(params.blockLen >= 1 && params.blockLen <= 2097151, "DataCopyPad: blockLen is not in 1 to 2097151 bytes");
  require(params.blockLen % element == 0, "DataCopyPad: blockLen is no multiple of the element");
}

constexpr size_t in_blocks(size_t bytes) {
  return (bytes + ascend_twin::kBlockBytes - 1) / ascend_twin::kBlockBytes * ascend_twin::kBlockBytes;
}

template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& padding) {
  using namespace ascend_twin;
  check_copy(params, sizeof(T));
  const bool none = padding.leftPadding == 0 && padding.rightPadding == 0;
  require(padding.isPad || none, "DataCopyPad: padding without isPad");
  const size_t left = padding.leftPadding * sizeof(T), right = padding.rightPadding * sizeof(T);
  require(left <= kBlockBytes && right <= kBlockBytes, "DataCopyPad: padding of more than 32 bytes");
  const size_t given = left + params.blockLen + right, whole = in_blocks(given);
  Core& c = core();
  const auto pad = [&](size_t begin, size_t end) {
    for (; begin < end; begin += sizeof(T)) std::memcpy(c.ub.data() + begin, &padding.paddingValue, sizeof(T));
  };
  const auto* from = reinterpret_cast<const uint8_t*>(src.data());
  size_t at = dst.first(0).begin;
  const size_t end = dst.begin + dst.bytes;
  for (uint16_t block = 0; block < params.blockCount; ++block) {
    require(at + whole <= end, "DataCopyPad writes past the end of its UB tensor");
    check_global_read(from, params.blockLen, false);
    if (block > 0) --c.now[kIn];  // one operation
    operation(kIn, {}, {{at, whole}});
    std::memset(c.ub.data() + at, kPoison, whole);
    pad(at, at + left);
    std::memcpy(c.ub.data() + at + left, from, params.blockLen);
    pad(at + left + params.blockLen, at + given);
    std::memset(c.known.data() + at + given, 0, whole - given);  // anything may be there
    from += params.blockLen + params.srcStride;
    at += whole + params.dstStride * kBlockBytes;
  }
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params) {
  using namespace ascend_twin;
  check_copy(params, sizeof(T));
  Core& c = core();
  auto* to = reinterpret_cast<uint8_t*>(dst.data());
  size_t at = src.first(0).begin;
  const size_t end = src.begin + src.bytes;
  for (uint16_t block = 0; block < params.blockCount; ++block) {
    require(at + params.blockLen <= end, "DataCopyPad reads past the end of its UB tensor");
    if (block > 0) --c.now[kOut];
    operation(kOut, {{at, params.blockLen}}, {});
    check_global_write(to, params.blockLen);
    std::memcpy(to, c.ub.data() + at, params.blockLen);
    at += in_blocks(params.blockLen) + params.srcStride * kBlockBytes;
    to += params.blockLen + params.dstStride;
  }
}

}  // namespace AscendC
