// token_logprob's CUDA kernels on the host twin, for tests/ops/cuda_twin/token_logprob_twin.py.
#include "token_logprob/token_logprob_cuda.cu"

using namespace mdapo::token_logprob;

// `dtype` counts as in Dtype; `values` are the stats, or with `gradient` the terms.
extern "C" int token_logprob_twin(int gradient, int dtype, void* logits, const int64_t* targets, void* values,
                                  const int64_t* shape, double temperature) {
  const auto [rows, cols, row_stride, first_id, value_stride] = *reinterpret_cast<const int64_t (*)[5]>(shape);
  const Tile tile{rows, cols, row_stride, first_id};
  const DeviceTile job{tile, static_cast<Dtype>(dtype), logits, targets, values, value_stride, temperature};
  const int64_t bytes[] = {4, 2, 8};
  const auto* begin = static_cast<const uint8_t*>(logits);
  if (rows > 0) twin::machine().buffers.push_back({begin, begin + ((rows - 1) * row_stride + cols) * bytes[dtype]});
  const cudaError_t error = gradient != 0 ? launch_gradient(job, nullptr) : launch_stats(job, nullptr);
  twin::machine().buffers.clear();
  return error;
}
