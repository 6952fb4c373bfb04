// Copies and zeros that go past the cache, for results too large to be read from it again: a plain store fetches the
// line that it is about to overwrite, which is a third of the traffic of a copy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mdapo {

constexpr int64_t kLine = 64;

// Bytes up to the next line, at most `size`.
inline int64_t to_next_line(const uint8_t* at, int64_t size) {
  return std::min<int64_t>(size, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(at) % kLine));
}

// One aligned line; anywhere but on x86, and where a sanitizer looks on, as any other store.
inline void stream_line(uint8_t* to, const uint8_t* from) {
#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__)
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
#else
  std::memcpy(to, from, kLine);
#endif
}

// Copies `size` bytes, and fetches `next_size` bytes at `next` that will be copied after them: rows end long before the
// hardware has seen a stream.
inline void stream_copy(uint8_t* to, const uint8_t* from, int64_t size, const uint8_t* next, int64_t next_size) {
  int64_t at = to_next_line(to, size);
  std::memcpy(to, from, static_cast<size_t>(at));
  for (; at + kLine <= size; at += kLine) {
    if (at < next_size) __builtin_prefetch(next + at, 0, 3);
    stream_line(to + at, from + at);
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(size - at));
}

// Asks for bytes that will be read soon.
inline void fetch(const uint8_t* from, int64_t size) {
  for (int64_t at = 0; at < size; at += kLine) __builtin_prefetch(from + at, 0, 2);
}

inline void stream_zeros(uint8_t* to, int64_t size) {
  constexpr uint8_t kZeros[kLine] = {};
  int64_t at = to_next_line(to, size);
  std::memset(to, 0, static_cast<size_t>(at));
  for (; at + kLine <= size; at += kLine) stream_line(to + at, kZeros);
  std::memset(to + at, 0, static_cast<size_t>(size - at));
}

// After streamed stores, before others may read them.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace mdapo
