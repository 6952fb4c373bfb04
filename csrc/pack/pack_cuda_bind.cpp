// pack, unpack and mask_spans on CUDA: tensors to launchers.
#include <torch/csrc/stable/accelerator.h>

#include "common/cuda_stream.h"
#include "pack/pack_cuda.h"
#include "pack/pack_torch.h"

namespace mdapo::pack {
namespace {

// The pieces where the kernel finds them. The copy is staged before the call returns, so `pieces` may go.
Tensor upload(const std::vector<Piece>& pieces, const Tensor& like, cudaStream_t stream) {
  const auto bytes = static_cast<int64_t>(pieces.size() * sizeof(Piece));
  Tensor buffer = torch::stable::new_empty(like, {bytes}, torch::headeronly::ScalarType::Byte);
  if (bytes > 0) {
    check_cuda(
        cudaMemcpyAsync(buffer.data_ptr(), pieces.data(), static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream));
  }
  return buffer;
}

std::vector<Tensor> copy(const std::vector<Tensor>& fields, const std::vector<Piece>& pieces, int64_t tokens) {
  const int32_t device = fields[0].get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Tensor on_device = upload(pieces, fields[0], stream);
  CopyJob job{};
  job.pieces = static_cast<const Piece*>(on_device.data_ptr());
  job.num_pieces = static_cast<int64_t>(pieces.size());
  const auto launch = [&] {
    check_cuda(launch_copy(job, stream));
    job.num_fields = 0;
    job.num_blocks = 0;
  };
  std::vector<Tensor> outputs;
  for (const Tensor& field : fields) {
    STD_TORCH_CHECK(field.is_cuda() && field.get_device_index() == device, "fields are on different devices");
    outputs.push_back(like(field, tokens));
    const int64_t item = item_bytes(field), bytes = item * tokens;
    STD_TORCH_CHECK(item < INT32_MAX, "a token of ", item, " bytes is too large");
    if (bytes == 0) continue;
    if (job.num_fields == kMaxFields) launch();
    job.fields[job.num_fields++] = {static_cast<const uint8_t*>(field.data_ptr()),
                                    static_cast<uint8_t*>(outputs.back().data_ptr()),
                                    item * field.size(0),
                                    bytes,
                                    static_cast<uint32_t>(item),
                                    job.num_blocks};
    job.num_blocks += static_cast<uint32_t>((bytes + kTileBytes - 1) / kTileBytes);
  }
  launch();
  return outputs;
}

std::vector<Tensor> pack(std::vector<Tensor> fields, Tensor runs, int64_t total, int64_t cp, int64_t cp_rank) {
  fields = contiguous(std::move(fields));
  const auto pieces = to_packed(runs_of(runs), {cp, cp_rank}, tokens_of(fields), total);
  return copy(fields, pieces, total / cp);
}

std::vector<Tensor> unpack(std::vector<Tensor> fields, Tensor runs, int64_t rows, int64_t cp, int64_t cp_rank) {
  fields = contiguous(std::move(fields));
  const auto pieces = to_rows(runs_of(runs), {cp, cp_rank}, rows, tokens_of(fields) * cp);
  return copy(fields, pieces, rows);
}

Tensor mask_spans(Tensor mask) {
  STD_TORCH_CHECK(mask.dim() == 2 && mask.scalar_type() == torch::headeronly::ScalarType::Bool, "mask: bool [B, S]");
  if (!mask.is_contiguous()) mask = torch::stable::contiguous(mask);
  const int32_t device = mask.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor spans = torch::stable::new_empty(mask, {3, mask.size(0)}, torch::headeronly::ScalarType::Long);
  check_cuda(launch_mask_spans(static_cast<const uint8_t*>(mask.data_ptr()), static_cast<int64_t*>(spans.data_ptr()),
                               mask.size(0), mask.size(1), current_stream(device)));
  return spans;
}

}  // namespace
}  // namespace mdapo::pack

STABLE_TORCH_LIBRARY_IMPL(mdapo, CUDA, m) {
  m.impl("pack", TORCH_BOX(&mdapo::pack::pack));
  m.impl("unpack", TORCH_BOX(&mdapo::pack::unpack));
  m.impl("mask_spans", TORCH_BOX(&mdapo::pack::mask_spans));
}
