// Types of the Ascend C API that kernels name: positions, events, numbers, tensors in UB and in GM.
#pragma once

#include "core.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type)

struct bfloat16_t {
  uint16_t bits;
};

using event_t = int32_t;

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

namespace AscendC {

enum class TPosition { VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;
enum class HardEvent { V_S, S_V, MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_S, S_MTE2, S_MTE3, MTE3_S, MTE2_MTE3, MTE3_MTE2 };
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };

inline float ToFloat(const bfloat16_t& value) {
  const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
  float f;
  std::memcpy(&f, &wide, sizeof f);
  return f;
}

inline int64_t GetBlockIdx() { return ascend_twin::machine().index; }
inline int64_t GetBlockNum() { return ascend_twin::machine().count; }

template <class T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(size_t begin, size_t bytes, int owner = -1, int slot = -1)
      : begin(begin), bytes(bytes), owner(owner), slot(slot) {}

  // Elements from `offset` on.
  LocalTensor operator[](uint32_t offset) const {
    ascend_twin::require(offset * sizeof(T) <= bytes, "an offset outside of its UB tensor");
    return LocalTensor(begin + offset * sizeof(T), bytes - offset * sizeof(T), owner, slot);
  }
  uint32_t GetSize() const { return static_cast<uint32_t>(bytes / sizeof(T)); }
  T GetValue(uint32_t index) const {
    ascend_twin::operation(ascend_twin::kScalar, {range(index)}, {});
    T value;
    std::memcpy(&value, ascend_twin::core().ub.data() + begin + index * sizeof(T), sizeof(T));
    return value;
  }
  void SetValue(uint32_t index, T value) const {
    ascend_twin::operation(ascend_twin::kScalar, {}, {range(index)});
    std::memcpy(ascend_twin::core().ub.data() + begin + index * sizeof(T), &value, sizeof(T));
  }

  // `count` elements as a vector instruction or a transfer takes them.
  ascend_twin::Range first(size_t count, size_t align = ascend_twin::kBlockBytes) const {
    using ascend_twin::require;
    require(begin % align == 0, "a UB address that is not " + std::to_string(align) + "-byte aligned");
    require(count * sizeof(T) <= bytes,
            std::to_string(count) + " elements of a UB tensor of " + std::to_string(bytes / sizeof(T)));
    return {begin, count * sizeof(T)};
  }
  T* data() const { return reinterpret_cast<T*>(ascend_twin::core().ub.data() + begin); }

  size_t begin = 0, bytes = 0;
  int owner = -1, slot = -1;  // the queue, and its buffer

 private:
  ascend_twin::Range range(uint32_t index) const {
    ascend_twin::require((index + 1) * sizeof(T) <= bytes, "an element outside of its UB tensor");
    return {begin + index * sizeof(T), sizeof(T)};
  }
};

template <class T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* buffer) { SetGlobalBuffer(buffer, std::numeric_limits<uint64_t>::max()); }
  void SetGlobalBuffer(T* buffer, uint64_t size) {
    at = buffer;
    elements = size;
  }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part;
    part.SetGlobalBuffer(at + offset, elements - offset);
    return part;
  }
  // Through the scalar unit's cache.
  T GetValue(uint64_t offset) const {
    ascend_twin::require(offset < elements, "an element outside of its GM tensor");
    ascend_twin::check_global_read(at + offset, sizeof(T), true);
    T value;
    std::memcpy(&value, at + offset, sizeof(T));
    return value;
  }
  T* data() const { return at; }

 private:
  T* at = nullptr;
  uint64_t elements = 0;
};

}  // namespace AscendC
