// Vector instructions on the first `count` elements of tensors in UB: float32, and conversion from and to bfloat16.
#pragma once

#include "tensors.h"

namespace AscendC {

using Floats = LocalTensor<float>;

template <class F>
void map(const Floats& dst, const Floats& src, int32_t count, F&& of) {
  const auto n = static_cast<size_t>(count);
  ascend_twin::operation(ascend_twin::kVector, {src.first(n)}, {dst.first(n)});
  for (size_t i = 0; i < n; ++i) dst.data()[i] = of(src.data()[i]);
}

template <class F>
void map(const Floats& dst, const Floats& a, const Floats& b, int32_t count, F&& of) {
  const auto n = static_cast<size_t>(count);
  ascend_twin::operation(ascend_twin::kVector, {a.first(n), b.first(n)}, {dst.first(n)});
  for (size_t i = 0; i < n; ++i) dst.data()[i] = of(a.data()[i], b.data()[i]);
}

inline float larger(float a, float b) {
  if (a != a || b != b) return ascend_twin::machine().max_keeps_nan ? NAN : (a != a ? b : a);
  return a > b ? a : b;
}

inline void Adds(const Floats& dst, const Floats& src, const float& scalar, const int32_t& count) {
  map(dst, src, count, [&](float v) { return v + scalar; });
}
inline void Muls(const Floats& dst, const Floats& src, const float& scalar, const int32_t& count) {
  map(dst, src, count, [&](float v) { return v * scalar; });
}
inline void Maxs(const Floats& dst, const Floats& src, const float& scalar, const int32_t& count) {
  map(dst, src, count, [&](float v) { return larger(v, scalar); });
}
inline void Exp(const Floats& dst, const Floats& src, const int32_t& count) {
  map(dst, src, count, [](float v) { return std::exp(v); });
}
inline void Add(const Floats& dst, const Floats& a, const Floats& b, const int32_t& count) {
  map(dst, a, b, count, [](float x, float y) { return x + y; });
}
inline void Sub(const Floats& dst, const Floats& a, const Floats& b, const int32_t& count) {
  map(dst, a, b, count, [](float x, float y) { return x - y; });
}
inline void Mul(const Floats& dst, const Floats& a, const Floats& b, const int32_t& count) {
  map(dst, a, b, count, [](float x, float y) { return x * y; });
}
inline void Max(const Floats& dst, const Floats& a, const Floats& b, const int32_t& count) {
  map(dst, a, b, count, larger);
}

// 16- and 32-bit types; the documentation names no 8-bit ones.
template <class T>
void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes 16- and 32-bit types");
  const auto n = static_cast<size_t>(count);
  ascend_twin::operation(ascend_twin::kVector, {}, {dst.first(n)});
  std::fill(dst.data(), dst.data() + n, value);
}

inline void Cast(const Floats& dst, const LocalTensor<bfloat16_t>& src, const RoundMode& mode, const uint32_t& count) {
  ascend_twin::require(mode == RoundMode::CAST_NONE, "Cast from bfloat16 to float32 takes CAST_NONE");
  ascend_twin::operation(ascend_twin::kVector, {src.first(count)}, {dst.first(count)});
  for (uint32_t i = 0; i < count; ++i) dst.data()[i] = ToFloat(src.data()[i]);
}

inline void Cast(const LocalTensor<bfloat16_t>& dst, const Floats& src, const RoundMode& mode, const uint32_t& count) {
  ascend_twin::require(mode != RoundMode::CAST_NONE, "Cast from float32 to bfloat16 takes a rounding mode");
  ascend_twin::require(mode == RoundMode::CAST_RINT, "a rounding mode that the twin does not know");
  ascend_twin::operation(ascend_twin::kVector, {src.first(count)}, {dst.first(count)});
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, src.data() + i, sizeof bits);
    const bool nan = src.data()[i] != src.data()[i];
    dst.data()[i].bits = static_cast<uint16_t>(nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

constexpr size_t kRepeat = 64;  // float32 of one vector instruction

// Two elements are written: the result, and a second one that only means something with calIndex. The working space
// holds two elements for each repeat.
template <class F>
void reduce(const Floats& dst, const Floats& src, const Floats& work, int32_t count, F&& of) {
  using namespace ascend_twin;
  const auto n = static_cast<size_t>(count);
  const size_t repeats = (n + kRepeat - 1) / kRepeat;
  require(count >= 1, "a reduction of nothing");
  require((2 * repeats + 7) / 8 * 8 * sizeof(float) <= work.bytes, "the working space of a reduction is too small");
  operation(kVector, {src.first(n)}, {dst.first(2, 8), work.first(2 * repeats)});
  std::vector<float> values(src.data(), src.data() + n);
  while (values.size() > 1) {  // a fixed tree
    const size_t half = (values.size() + 1) / 2;
    for (size_t i = 0; i + half < values.size(); ++i) values[i] = of(values[i], values[i + half]);
    values.resize(half);
  }
  std::fill(work.data(), work.data() + 2 * repeats, NAN);
  dst.data()[0] = values[0];
  dst.data()[1] = NAN;
}

inline void ReduceMax(const Floats& dst, const Floats& src, const Floats& work, const int32_t count,
                      bool calIndex = false) {
  ascend_twin::require(!calIndex, "the index of a maximum is not modelled");
  reduce(dst, src, work, count, larger);
}

inline void ReduceSum(const Floats& dst, const Floats& src, const Floats& work, const int32_t count) {
  reduce(dst, src, work, count, [](float x, float y) { return x + y; });
}

}  // namespace AscendC
