// Copies and zeros that go past the cache, for results too large to be read from it again: a plain store fetches the
// line that it is about to overwrite, which is a third of the traffic of a copy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__) && !defined(__SANITIZE_ADDRESS__)  // a sanitizer sees plain stores only
#define MDAPO_STREAM 1
#include <immintrin.h>
#endif

namespace mdapo {

constexpr int64_t kLine = 64;

// Bytes up to the next line, at most `size`.
inline int64_t to_next_line(const uint8_t* at, int64_t size) {
  return std::min<int64_t>(size, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(at) % kLine));
}

// Copies and zeros of whole lines, `to` at the start of one. A copy fetches up to `next_size` bytes at `next`
// meanwhile.
struct Lines {
  void (*copy)(uint8_t* to, const uint8_t* from, int64_t lines, const uint8_t* next, int64_t next_size);
  void (*zeros)(uint8_t* to, int64_t lines);
};

#if defined(MDAPO_STREAM)
inline void copy_lines(uint8_t* to, const uint8_t* from, int64_t lines, const uint8_t* next, int64_t next_size) {
  for (int64_t at = 0; at < lines * kLine; at += kLine) {
    if (at < next_size) _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T0);
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
  }
}

inline void zero_lines(uint8_t* to, int64_t lines) {
  auto* target = reinterpret_cast<__m128i*>(to);
  for (int64_t i = 0; i < 4 * lines; ++i) _mm_stream_si128(target + i, _mm_setzero_si128());
}

// A line in one store is never left half written.
__attribute__((target("avx512f"))) inline void copy_lines_avx512(uint8_t* to, const uint8_t* from, int64_t lines,
                                                                 const uint8_t* next, int64_t next_size) {
  for (int64_t at = 0; at < lines * kLine; at += kLine) {
    if (at < next_size) _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T0);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  }
}

__attribute__((target("avx512f"))) inline void zero_lines_avx512(uint8_t* to, int64_t lines) {
  auto* target = reinterpret_cast<__m512i*>(to);
  for (int64_t i = 0; i < lines; ++i) _mm512_stream_si512(target + i, _mm512_setzero_si512());
}

#endif

inline const Lines kPlainLines = {
    [](uint8_t* to, const uint8_t* from, int64_t lines, const uint8_t*, int64_t) {
      std::memcpy(to, from, static_cast<size_t>(lines * kLine));
    },
    [](uint8_t* to, int64_t lines) { std::memset(to, 0, static_cast<size_t>(lines * kLine)); },
};

// The widest that this CPU has.
inline const Lines& lines_of_cpu() {
#if defined(MDAPO_STREAM)
  static const Lines lines =
      __builtin_cpu_supports("avx512f") ? Lines{copy_lines_avx512, zero_lines_avx512} : Lines{copy_lines, zero_lines};
  return lines;
#else
  return kPlainLines;
#endif
}

// Copies `size` bytes, and fetches `next_size` bytes at `next` that will be copied after them: rows end long before the
// hardware has seen a stream.
inline void stream_copy(uint8_t* to, const uint8_t* from, int64_t size, const uint8_t* next, int64_t next_size,
                        const Lines& lines = lines_of_cpu()) {
  const int64_t head = to_next_line(to, size), count = (size - head) / kLine, tail = head + count * kLine;
  std::memcpy(to, from, static_cast<size_t>(head));
  lines.copy(to + head, from + head, count, next, next_size);
  std::memcpy(to + tail, from + tail, static_cast<size_t>(size - tail));
}

inline void stream_zeros(uint8_t* to, int64_t size, const Lines& lines = lines_of_cpu()) {
  const int64_t head = to_next_line(to, size), count = (size - head) / kLine, tail = head + count * kLine;
  std::memset(to, 0, static_cast<size_t>(head));
  lines.zeros(to + head, count);
  std::memset(to + tail, 0, static_cast<size_t>(size - tail));
}

// Asks for bytes that will be read soon.
inline void fetch(const uint8_t* from, int64_t size) {
  for (int64_t at = 0; at < size; at += kLine) __builtin_prefetch(from + at, 0, 2);
}

// After streamed stores, before others may read them.
inline void stream_fence() {
#if defined(MDAPO_STREAM)
  _mm_sfence();
#endif
}

}  // namespace mdapo
