// token_logprob on Ascend: tensors to launchers, on torch's current stream.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "common/ascend_stream.h"
#include "token_logprob/token_logprob_ascend.h"
#include "token_logprob/token_logprob_torch.h"

namespace mdapo::token_logprob {
namespace {

using torch::headeronly::ScalarType;

// Tensors are captured: their memory must not go to another before the launch has its turn.
template <class Launch>
void run(const char* name, Launch launch, const Tensor& values_KR, int64_t kinds, const Tensor& logits_RC,
         const Tensor& targets_R, int64_t first_id, double temperature) {
  const torch::stable::accelerator::DeviceGuard guard(logits_RC.get_device_index());
  const Tile tile = checked_tile(values_KR, kinds, logits_RC, targets_R, first_id, temperature);
  STD_TORCH_CHECK(logits_RC.scalar_type() != ScalarType::Double, "token_logprob: an Ascend core has no float64");
  if (tile.rows == 0 || tile.cols == 0) return;
  const AscendTile job{tile,
                       logits_RC.scalar_type() == ScalarType::BFloat16,
                       logits_RC.data_ptr(),
                       static_cast<const int64_t*>(targets_R.data_ptr()),
                       values_KR.data_ptr(),
                       values_KR.stride(0),
                       static_cast<float>(1 / temperature)};
  enqueue(name, [=](void* stream) {
    (void)values_KR, (void)logits_RC, (void)targets_R;
    launch(job, vector_cores(), stream);
  });
}

void write_stats(Tensor stats_4R, Tensor logits_RC, Tensor targets_R, int64_t first_id, double temperature) {
  run("mdapo_token_logprob_stats", launch_stats, stats_4R, kStatsRows, logits_RC, targets_R, first_id, temperature);
}

void write_gradient(Tensor logits_RC, Tensor targets_R, Tensor terms_5R, int64_t first_id, double temperature) {
  run("mdapo_token_logprob_grad", launch_gradient, terms_5R, kTermsRows, logits_RC, targets_R, first_id, temperature);
}

}  // namespace
}  // namespace mdapo::token_logprob

STABLE_TORCH_LIBRARY_IMPL(mdapo, PrivateUse1, m) {
  m.impl("token_logprob_stats", TORCH_BOX(&mdapo::token_logprob::write_stats));
  m.impl("token_logprob_grad", TORCH_BOX(&mdapo::token_logprob::write_gradient));
}
