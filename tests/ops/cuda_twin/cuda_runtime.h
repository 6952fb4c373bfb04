// A host twin of the part of CUDA that csrc's plain kernels use: the very same .cu file compiles with g++ and runs on
// the CPU, thread by thread, against the vectors of the other backends. Written from NVIDIA's public programming guide.
//
// Blocks run one after the other. The threads of a block are fibers that change places at __syncthreads and at warp
// exchanges only, so it finds wrong arithmetic, bounds, alignment and barriers that not all threads reach, but no race.
// Every __ldg and every 16-byte store is checked against the buffers that were registered and for its alignment.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one at a time

using std::max;
using std::min;

struct dim3 {
  uint32_t x, y, z;
  dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};

struct uint4 {
  uint32_t x, y, z, w;
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace twin {

constexpr uint32_t kWarp = 32;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda twin: %s\n", what);
  std::abort();
}

struct Buffer {
  const uint8_t* begin;
  const uint8_t* end;
};

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack;
  dim3 thread;
  bool done = false;
  long barriers = 0;  // passed by this thread
  int64_t exchanged = 0;
};

struct Machine {
  std::vector<Buffer> buffers;
  std::vector<Fiber> fibers;
  ucontext_t scheduler{};
  size_t running = 0;
  dim3 block, block_size;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
};

inline Machine& machine() {
  static Machine one;
  return one;
}

inline Fiber& current() { return machine().fibers[machine().running]; }

inline void check_access(const void* at, size_t size) {
  const auto* address = static_cast<const uint8_t*>(at);
  if (reinterpret_cast<uintptr_t>(address) % size != 0) fail("misaligned access");
  for (const Buffer& buffer : machine().buffers) {
    if (address >= buffer.begin && address + size <= buffer.end) return;
  }
  fail("access outside of every buffer");
}

// Back to the scheduler until every thread of the group has come as far.
inline void wait_for(size_t first, size_t last) {
  const long passed = ++current().barriers;
  for (;;) {
    bool all = true;
    for (size_t i = first; i < last; ++i) {
      const Fiber& other = machine().fibers[i];
      if (other.done && other.barriers < passed) fail("a thread left before a barrier that others wait at");
      all = all && other.barriers >= passed;
    }
    if (all) return;
    swapcontext(&current().context, &machine().scheduler);
  }
}

inline void start() {
  machine().body(machine().arguments);
  current().done = true;
}

inline void run_block() {
  Machine& m = machine();
  m.fibers.clear();
  m.fibers.resize(m.block_size.x);
  for (size_t i = 0; i < m.fibers.size(); ++i) {
    Fiber& fiber = m.fibers[i];
    constexpr size_t kStack = 32768;
    fiber.thread = dim3(static_cast<uint32_t>(i), 0, 0);
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &m.scheduler;
    makecontext(&fiber.context, start, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (m.running = 0; m.running < m.fibers.size(); ++m.running) {
      if (current().done) continue;
      swapcontext(&m.scheduler, &current().context);
      left = left || !current().done;
    }
  }
}

}  // namespace twin

#define threadIdx (twin::current().thread)
#define blockIdx (twin::machine().block)

inline void __syncthreads() { twin::wait_for(0, twin::machine().fibers.size()); }

template <class T>
inline T __ldg(const T* at) {
  twin::check_access(at, sizeof(T));
  return *at;
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}

// Loads with a hint for the caches.
template <class T>
inline T __ldcs(const T* at) {
  return __ldg(at);
}

template <class T>
inline T __ldcg(const T* at) {
  return __ldg(at);
}

namespace twin {

// What the lane `from` of this thread's warp gives; all of its lanes come here together.
template <class T>
inline T exchange(uint32_t mask, T value, size_t from) {
  static_assert(sizeof(T) <= sizeof(int64_t));
  if (mask != ~0u) fail("a warp exchange of a part of a warp is not modelled");
  auto& fibers = machine().fibers;
  const size_t first = machine().running / kWarp * kWarp;
  const size_t last = std::min<size_t>(first + kWarp, fibers.size());
  std::memcpy(&current().exchanged, &value, sizeof value);
  wait_for(first, last);
  T found;
  std::memcpy(&found, &fibers[first + from].exchanged, sizeof found);
  wait_for(first, last);
  return found;
}

inline size_t lane() { return machine().running % kWarp; }

}  // namespace twin

template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int lane_mask) {
  return twin::exchange(mask, value, twin::lane() ^ static_cast<size_t>(lane_mask));
}

template <class T>
inline T __shfl_down_sync(uint32_t mask, T value, unsigned delta) {
  const size_t from = twin::lane() + delta;
  return twin::exchange(mask, value, from < twin::kWarp ? from : twin::lane());
}

template <class... Parameters, class... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                      Arguments&&... arguments) {
  auto& m = twin::machine();
  auto call = [&] { kernel(static_cast<Parameters>(arguments)...); };
  m.body = [](void* bound) { (*static_cast<decltype(call)*>(bound))(); };
  m.arguments = &call;
  m.block_size = config->blockDim;
  for (uint32_t block = 0; block < config->gridDim.x; ++block) {
    m.block = dim3(block, 0, 0);
    twin::run_block();
  }
  return cudaSuccess;
}

// Memory of the device is the host's: each allocation is a buffer that accesses are checked against.
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

template <class T>
inline cudaError_t cudaMalloc(T** data, size_t size) {
  auto* begin = static_cast<uint8_t*>(std::aligned_alloc(256, (size + 255) / 256 * 256));
  twin::machine().buffers.push_back({begin, begin + size});
  *data = reinterpret_cast<T*>(begin);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* data) {
  auto& buffers = twin::machine().buffers;
  const auto starts = [data](const twin::Buffer& buffer) { return buffer.begin == data; };
  buffers.erase(std::remove_if(buffers.begin(), buffers.end(), starts), buffers.end());
  std::free(data);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the twin"; }
