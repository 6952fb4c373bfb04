// token_logprob on CUDA: one block a row, one pass over it in 16-byte words.
//
// A thread keeps sums of its own (online softmax), which the block merges in a fixed tree: no atomics, the same bits each
// time. Rows whose words are not aligned are read element by element.
#include <cuda_bf16.h>

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

template <class T, int N>
struct alignas(N * sizeof(T)) Word {
  T at[N];
};

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
    stats_kernel(const Tile tile, const T* __restrict__ logits, const int64_t* __restrict__ targets, Acc<T>* stats,
                 int64_t stride, Acc<T> scale) {
  using A = Acc<T>;
  const int64_t row = blockIdx.x;
  const T* z = logits + row_offset(tile, row);
  const int64_t words = tile.cols / N;
  Partial<A> part = empty_partial<A>();
  for (int64_t w = threadIdx.x; w < words; w += kThreads)
    add_word<N>(part, reinterpret_cast<const Word<T, N>*>(z)[w], scale);
  for (int64_t c = words * N + threadIdx.x; c < tile.cols; c += kThreads)
    add_word<1>(part, reinterpret_cast<const Word<T, 1>*>(z)[c], scale);
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
__device__ __forceinline__ void turn_word(Word<T, N>& word, const RowTerms<Acc<T>>& row, Acc<T> scale, int64_t target) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Acc<T> by_z = row.idle() ? Acc<T>(0) : gradient(row, scale, row.log_p(wide(word.at[i]) * scale), target == i);
    put(word.at[i], by_z);
  }
}

template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const Tile tile, T* __restrict__ logits, const int64_t* __restrict__ targets,
                    const Acc<T>* __restrict__ terms, int64_t stride, Acc<T> scale) {
  const int64_t row = blockIdx.x;
  T* z = logits + row_offset(tile, row);
  const Acc<T>* own = terms + row;
  const RowTerms<Acc<T>> of_row{own[kBase * stride], own[kLogSum * stride], own[kEntropy * stride],
                                own[kGradLogp * stride], own[kGradEntropy * stride]};
  const int64_t words = tile.cols / N, target = column_of(tile, targets[row]);
  for (int64_t w = threadIdx.x; w < words; w += kThreads) {
    Word<T, N>* at = reinterpret_cast<Word<T, N>*>(z) + w;
    Word<T, N> word = *at;
    turn_word<N>(word, of_row, scale, target - w * N);
    *at = word;
  }
  for (int64_t c = words * N + threadIdx.x; c < tile.cols; c += kThreads)
    turn_word<1>(reinterpret_cast<Word<T, 1>*>(z)[c], of_row, scale, target - c);
}

template <class T>
bool aligned(const DeviceTile& job) {
  const auto address = reinterpret_cast<uintptr_t>(job.logits);
  return address % kWordBytes == 0 && job.tile.row_stride * int64_t(sizeof(T)) % kWordBytes == 0;
}

template <int N, class T>
void run_stats(const DeviceTile& job, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(job.tile.rows);
  stats_kernel<N, T><<<blocks, kThreads, 0, stream>>>(job.tile, static_cast<const T*>(job.logits), job.targets,
                                                      static_cast<Acc<T>*>(job.values), job.value_stride,
                                                      Acc<T>(1 / job.temperature));
}

template <int N, class T>
void run_gradient(const DeviceTile& job, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(job.tile.rows);
  gradient_kernel<N, T><<<blocks, kThreads, 0, stream>>>(job.tile, static_cast<T*>(job.logits), job.targets,
                                                         static_cast<const Acc<T>*>(job.values), job.value_stride,
                                                         Acc<T>(1 / job.temperature));
}

template <class T, bool kStats>
void run(const DeviceTile& job, cudaStream_t stream) {
  constexpr int kPerWord = kWordBytes / sizeof(T);
  if constexpr (kStats) {
    aligned<T>(job) ? run_stats<kPerWord, T>(job, stream) : run_stats<1, T>(job, stream);
  } else {
    aligned<T>(job) ? run_gradient<kPerWord, T>(job, stream) : run_gradient<1, T>(job, stream);
  }
}

template <bool kStats>
cudaError_t launch(const DeviceTile& job, cudaStream_t stream) {
  if (job.tile.rows == 0 || job.tile.cols == 0) return cudaSuccess;  // an empty grid is an error to CUDA
  switch (job.dtype) {
    case Dtype::kFloat32: run<float, kStats>(job, stream); break;
    case Dtype::kBfloat16: run<__nv_bfloat16, kStats>(job, stream); break;
    case Dtype::kFloat64: run<double, kStats>(job, stream); break;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_stats(const DeviceTile& job, cudaStream_t stream) { return launch<true>(job, stream); }

cudaError_t launch_gradient(const DeviceTile& job, cudaStream_t stream) { return launch<false>(job, stream); }

}  // namespace mdapo::token_logprob
