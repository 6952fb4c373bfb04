// The host twin's machine: one AI core at a time, its unified buffer (UB), its four pipes, and global memory (GM).
//
// Kernels run in program order; what could go wrong between pipes that run side by side is found by vector clocks. Each
// 4-byte word of UB remembers who wrote it and who read it last; an access that no flag, queue or barrier orders after
// a conflicting one is a failure, whatever the values are.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ascend_twin {

constexpr size_t kUbBytes = 192 * 1024;  // of a vector core of Atlas A2 and A3
constexpr size_t kBlockBytes = 32;       // addresses in UB, and the unit of transfers to it
constexpr size_t kWordBytes = 4;
constexpr int kPipes = 4;
constexpr uint8_t kPoison = 0xA7;

enum Pipe : int { kScalar, kVector, kIn, kOut };  // S, V, MTE2 (GM to UB), MTE3 (UB to GM)

inline const char* name_of(int pipe) {
  constexpr const char* kNames[kPipes] = {"S", "V", "MTE2", "MTE3"};
  return kNames[pipe];
}

// What a broken kernel is told.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const std::string& what) { throw Failure("ascend twin: " + what); }

inline void require(bool holds, const std::string& what) {
  if (!holds) fail(what);
}

using Clock = std::array<int64_t, kPipes>;  // how far each pipe is known to have come

inline void merge(Clock& into, const Clock& other) {
  for (int pipe = 0; pipe < kPipes; ++pipe) into[pipe] = std::max(into[pipe], other[pipe]);
}

struct Word {
  int writer = -1;  // pipe
  int64_t written = 0;
  Clock read{};
};

// Global memory that a kernel may touch, and which core wrote each byte (core + 1, 0 for none).
struct GlobalBuffer {
  uint8_t* begin;
  size_t size;
  std::vector<uint16_t> writer;
};

struct Core {
  std::vector<uint8_t> ub = std::vector<uint8_t>(kUbBytes, kPoison);
  std::vector<uint8_t> known = std::vector<uint8_t>(kUbBytes, 0);  // bytes that somebody wrote
  std::vector<Word> words = std::vector<Word>(kUbBytes / kWordBytes);
  size_t allocated = 0;
  Clock now{};                                 // operations begun by each pipe
  std::array<Clock, kPipes> seen{};            // what each pipe may rely on; of itself: up to its last barrier
  std::map<std::pair<int, int>, Clock> flags;  // (event, id) -> what its setter had done
  std::vector<std::string> open;  // filled at the end of the kernel: queues with tensors that were not freed
};

struct Machine {
  int queues = 0;  // made so far: each has a number of its own
  std::vector<GlobalBuffer> buffers;
  Core core;
  int64_t index = 0;
  int64_t count = 1;
  bool max_keeps_nan = true;  // the documentation does not say what a maximum makes of NaN: kernels must bear both
};

inline Machine& machine() {
  static thread_local Machine one;
  return one;
}

inline Core& core() { return machine().core; }

inline std::string conflict(int pipe, const char* does, int other, const char* did, size_t byte) {
  return std::string("hazard: ") + name_of(pipe) + " " + does + " UB byte " + std::to_string(byte) + " that " +
         name_of(other) + " " + did + ", and nothing orders them";
}

// A pipe other than V takes its own operations one after the other.
inline bool ordered(int pipe, int other, int64_t time, int64_t own) {
  if (pipe == other) return pipe != kVector || time == own || time <= core().seen[pipe][pipe];
  return time <= core().seen[pipe][other];
}

struct Range {
  size_t begin, size;  // bytes of UB
};

// One operation of a pipe on UB: first what it reads, then what it writes.
inline void operation(int pipe, std::initializer_list<Range> reads, std::initializer_list<Range> writes) {
  Core& c = core();
  const int64_t own = ++c.now[pipe];
  for (const Range& range : reads) {
    if (range.size == 0) continue;
    const auto* known = c.known.data() + range.begin;
    const auto* gap = static_cast<const uint8_t*>(std::memchr(known, 0, range.size));
    const std::string byte = gap ? std::to_string(gap - c.known.data()) : "";
    if (gap) fail(std::string(name_of(pipe)) + " reads UB byte " + byte + " that nobody wrote");
    for (size_t w = range.begin / kWordBytes; w * kWordBytes < range.begin + range.size; ++w) {
      Word& word = c.words[w];
      if (word.writer >= 0 && !ordered(pipe, word.writer, word.written, own))
        fail(conflict(pipe, "reads", word.writer, "wrote", w * kWordBytes));
      word.read[pipe] = own;
    }
  }
  for (const Range& range : writes) {
    if (range.size == 0) continue;
    std::memset(c.known.data() + range.begin, 1, range.size);
    for (size_t w = range.begin / kWordBytes; w * kWordBytes < range.begin + range.size; ++w) {
      Word& word = c.words[w];
      if (word.writer >= 0 && !ordered(pipe, word.writer, word.written, own))
        fail(conflict(pipe, "writes", word.writer, "wrote", w * kWordBytes));
      for (int other = 0; other < kPipes; ++other) {
        if (!ordered(pipe, other, word.read[other], own))
          fail(conflict(pipe, "writes", other, "reads", w * kWordBytes));
      }
      word.writer = pipe;
      word.written = own;
    }
  }
}

// What others may rely on once they waited for this pipe.
inline Clock done_by(int pipe) {
  Clock clock = core().seen[pipe];
  clock[pipe] = core().now[pipe];
  return clock;
}

inline void barrier(int pipe) { core().seen[pipe][pipe] = core().now[pipe]; }

inline void barrier_of_all() {
  for (Clock& clock : core().seen) clock = core().now;
}

inline GlobalBuffer& buffer_of(const void* address, size_t size, const char* what) {
  const auto* at = static_cast<const uint8_t*>(address);
  for (GlobalBuffer& buffer : machine().buffers) {
    if (at >= buffer.begin && at + size <= buffer.begin + buffer.size) return buffer;
  }
  fail(std::string(what) + " of " + std::to_string(size) + " bytes outside of every GM buffer");
}

// The scalar unit reads through a cache that transfers don't know of. Who registers no memory has none checked.
inline void check_global_read(const void* address, size_t size, bool cached) {
  if (machine().buffers.empty()) return;
  GlobalBuffer& buffer = buffer_of(address, size, "a read");
  const auto* at = static_cast<const uint8_t*>(address);
  for (size_t i = static_cast<size_t>(at - buffer.begin), end = i + size; i < end; ++i) {
    const auto writer = buffer.writer[i];
    if (writer == 0) continue;
    if (writer != machine().index + 1) fail("a core reads a GM byte that another one wrote");
    if (cached) fail("S reads a GM byte that its own MTE3 wrote: its cache may not know");
    fail("MTE2 reads a GM byte that its own MTE3 wrote");
  }
}

inline void check_global_write(const void* address, size_t size) {
  if (machine().buffers.empty()) return;
  GlobalBuffer& buffer = buffer_of(address, size, "a write");
  const auto* at = static_cast<const uint8_t*>(address);
  const auto own = static_cast<uint16_t>(machine().index + 1);
  for (size_t i = static_cast<size_t>(at - buffer.begin), end = i + size; i < end; ++i) {
    if (buffer.writer[i] != 0 && buffer.writer[i] != own) fail("two cores write one GM byte");
    if (buffer.writer[i] == own) fail("one core writes a GM byte twice");
    buffer.writer[i] = own;
  }
}

// Makes memory known to the kernels of this thread; `bytes` 0 is nothing.
inline void add_buffer(const void* begin, size_t bytes) {
  auto* at = static_cast<uint8_t*>(const_cast<void*>(begin));
  machine().buffers.push_back({at, bytes, std::vector<uint16_t>(bytes, 0)});
}

inline void finish_core() {
  const Core& c = core();
  require(c.flags.empty(), "a flag that was set is left without a wait");
  require(c.open.empty(), c.open.empty() ? "" : c.open.front());
}

}  // namespace ascend_twin
