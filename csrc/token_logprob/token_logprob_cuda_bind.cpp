// token_logprob on CUDA: tensors to launchers, on torch's current stream.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "common/cuda_stream.h"
#include "token_logprob/token_logprob_cuda.h"
#include "token_logprob/token_logprob_torch.h"

namespace mdapo::token_logprob {
namespace {

using torch::headeronly::ScalarType;

DeviceTile device_tile(const Tensor& values_KR, int64_t kinds, const Tensor& logits_RC, const Tensor& targets_R,
                       int64_t first_id, double temperature) {
  const Tile tile = checked_tile(values_KR, kinds, logits_RC, targets_R, first_id, temperature);
  const ScalarType type = logits_RC.scalar_type();
  const Dtype dtype = type == ScalarType::Float      ? Dtype::kFloat32
                      : type == ScalarType::BFloat16 ? Dtype::kBfloat16
                                                     : Dtype::kFloat64;
  return {tile,
          dtype,
          logits_RC.data_ptr(),
          static_cast<const int64_t*>(targets_R.data_ptr()),
          values_KR.data_ptr(),
          values_KR.stride(0),
          temperature};
}

void write_stats(Tensor stats_4R, Tensor logits_RC, Tensor targets_R, int64_t first_id, double temperature) {
  const int32_t device = logits_RC.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const DeviceTile job = device_tile(stats_4R, kStatsRows, logits_RC, targets_R, first_id, temperature);
  check_cuda(launch_stats(job, current_stream(device)));
}

void write_gradient(Tensor logits_RC, Tensor targets_R, Tensor terms_5R, int64_t first_id, double temperature) {
  const int32_t device = logits_RC.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const DeviceTile job = device_tile(terms_5R, kTermsRows, logits_RC, targets_R, first_id, temperature);
  check_cuda(launch_gradient(job, current_stream(device)));
}

}  // namespace
}  // namespace mdapo::token_logprob

STABLE_TORCH_LIBRARY_IMPL(mdapo, CUDA, m) {
  m.impl("token_logprob_stats", TORCH_BOX(&mdapo::token_logprob::write_stats));
  m.impl("token_logprob_grad", TORCH_BOX(&mdapo::token_logprob::write_gradient));
}
