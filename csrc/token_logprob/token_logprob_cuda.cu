// token_logprob on CUDA: one block a row, one pass over it in 16-byte words.
//
// A thread keeps sums of its own (online softmax), which the block merges in a fixed tree: no atomics, the same bits
// each time. Rows whose words are not aligned are read element by element.
#include <cuda_bf16.h>

#include <cstring>

#include "token_logprob/token_logprob_cuda.h"

namespace mdapo::token_logprob {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWordBytes = 16;

template <class T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <class T>
using Acc = typename Accumulator<T>::type;

// N neighbouring logits: 16 bytes, or one logit.
template <class T, int N>
struct Word {
  T at[N];
};

// Each logit is read once: past the first-level cache, and in forward as the first to go from the second.
template <int N, bool kLast, class T>
__device__ __forceinline__ Word<T, N> load(const T* at) {
  Word<T, N> word;
  if constexpr (N == 1) {
    word.at[0] = kLast ? __ldcs(at) : __ldcg(at);
  } else {
    const auto* from = reinterpret_cast<const uint4*>(at);
    const uint4 bits = kLast ? __ldcs(from) : __ldcg(from);
    memcpy(&word, &bits, kWordBytes);
  }
  return word;
}

template <int N, class T>
__device__ __forceinline__ void store(T* at, const Word<T, N>& word) {
  if constexpr (N == 1) {
    *at = word.at[0];
  } else {
    uint4 bits;
    memcpy(&bits, &word, kWordBytes);
    *reinterpret_cast<uint4*>(at) = bits;
  }
}

__device__ __forceinline__ float wide(float v) { return v; }
__device__ __forceinline__ double wide(double v) { return v; }
__device__ __forceinline__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ void put(float& to, float v) { to = v; }
__device__ __forceinline__ void put(double& to, double v) { to = v; }
__device__ __forceinline__ void put(__nv_bfloat16& to, float v) { to = __float2bfloat16_rn(v); }

template <class A>
__device__ __forceinline__ Partial<A> from_lane(const Partial<A>& part, int offset) {
  return {__shfl_down_sync(0xffffffffu, part.largest, offset), __shfl_down_sync(0xffffffffu, part.sum, offset),
          __shfl_down_sync(0xffffffffu, part.moment, offset)};
}

template <class A>
__device__ __forceinline__ Partial<A> over_warp(Partial<A> part) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) part = merged(part, from_lane(part, offset));
  return part;
}

// The merged sums of all threads, in thread 0.
template <class A>
__device__ __forceinline__ Partial<A> over_block(Partial<A> part) {
  __shared__ Partial<A> of_warp[kWarps];
  part = over_warp(part);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = part;
  __syncthreads();
  if (threadIdx.x < kWarp) part = over_warp(threadIdx.x < kWarps ? of_warp[threadIdx.x] : empty_partial<A>());
  return part;
}

// N columns at once: one change of base for all of them.
template <int N, class T, class A>
__device__ __forceinline__ void add_word(Partial<A>& part, const Word<T, N>& word, A scale) {
  A x[N], largest = part.largest;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = wide(word.at[i]) * scale;
    largest = x[i] > largest ? x[i] : largest;
  }
  if (largest > part.largest) part = rebased(part, largest);
  const A base = base_of(part.largest);
#pragma unroll
  for (int i = 0; i < N; ++i) add(part, bounded(x[i] - base));
}

template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    stats_kernel(const Tile tile, T* logits, const int64_t* targets, Acc<T>* stats, int64_t stride, Acc<T> scale) {
  using A = Acc<T>;
  const int64_t row = blockIdx.x;
  const T* z = logits + row_offset(tile, row);
  const int64_t words = tile.cols / N;
  Partial<A> part = empty_partial<A>();
  for (int64_t w = threadIdx.x; w < words; w += kThreads) add_word(part, load<N, true>(z + w * N), scale);
  for (int64_t c = words * N + threadIdx.x; c < tile.cols; c += kThreads) add_word(part, load<1, true>(z + c), scale);
  part = over_block(part);
  if (threadIdx.x != 0) return;
  A* own = stats + row;
  const Partial<A> before{own[kLargest * stride], own[kSum * stride], own[kMoment * stride]};
  part = merged(before, part);
  own[kLargest * stride] = part.largest;
  own[kSum * stride] = part.sum;
  own[kMoment * stride] = part.moment;
  const int64_t target = column_of(tile, targets[row]);
  if (target >= 0) own[kTarget * stride] = wide(z[target]) * scale;
}

template <int N, class T>
__device__ __forceinline__ void turn(T* z, int64_t column, const RowTerms<Acc<T>>& row, Acc<T> scale, int64_t target) {
  Word<T, N> word = load<N, false>(z + column);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool is_target = column + i == target;
    put(word.at[i], row.idle() ? Acc<T>(0) : gradient(row, scale, row.log_p(wide(word.at[i]) * scale), is_target));
  }
  store<N>(z + column, word);
}

template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const Tile tile, T* logits, const int64_t* targets, Acc<T>* terms, int64_t stride, Acc<T> scale) {
  const int64_t row = blockIdx.x;
  T* z = logits + row_offset(tile, row);
  const Acc<T>* own = terms + row;
  const RowTerms<Acc<T>> of_row{own[kBase * stride], own[kLogSum * stride], own[kEntropy * stride],
                                own[kGradLogp * stride], own[kGradEntropy * stride]};
  const int64_t words = tile.cols / N, target = column_of(tile, targets[row]);
  for (int64_t w = threadIdx.x; w < words; w += kThreads) turn<N>(z, w * N, of_row, scale, target);
  for (int64_t c = words * N + threadIdx.x; c < tile.cols; c += kThreads) turn<1>(z, c, of_row, scale, target);
}

template <class T>
bool aligned(const DeviceTile& job) {
  const auto address = reinterpret_cast<uintptr_t>(job.logits);
  return address % kWordBytes == 0 && job.tile.row_stride * int64_t(sizeof(T)) % kWordBytes == 0;
}

template <int N, class T, bool kStats>
cudaError_t run(const DeviceTile& job, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(job.tile.rows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  auto* logits = static_cast<T*>(job.logits);
  auto* values = static_cast<Acc<T>*>(job.values);
  const auto scale = Acc<T>(1 / job.temperature);
  const auto kernel = kStats ? stats_kernel<N, T> : gradient_kernel<N, T>;
  return cudaLaunchKernelEx(&config, kernel, job.tile, logits, job.targets, values, job.value_stride, scale);
}

template <class T, bool kStats>
cudaError_t run_aligned(const DeviceTile& job, cudaStream_t stream) {
  constexpr int kPerWord = kWordBytes / sizeof(T);
  return aligned<T>(job) ? run<kPerWord, T, kStats>(job, stream) : run<1, T, kStats>(job, stream);
}

template <bool kStats>
cudaError_t launch(const DeviceTile& job, cudaStream_t stream) {
  if (job.tile.rows == 0 || job.tile.cols == 0) return cudaSuccess;  // an empty grid is an error to CUDA
  switch (job.dtype) {
    case Dtype::kFloat32:
      return run_aligned<float, kStats>(job, stream);
    case Dtype::kBfloat16:
      return run_aligned<__nv_bfloat16, kStats>(job, stream);
    default:
      return run_aligned<double, kStats>(job, stream);
  }
}

}  // namespace

cudaError_t launch_stats(const DeviceTile& job, cudaStream_t stream) { return launch<true>(job, stream); }

cudaError_t launch_gradient(const DeviceTile& job, cudaStream_t stream) { return launch<false>(job, stream); }

}  // namespace mdapo::token_logprob
