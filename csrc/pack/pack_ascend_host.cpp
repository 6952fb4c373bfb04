// pack and unpack on Ascend: tensors to the launcher. mask_spans has no kernel here; its reference serves.
#include <torch/csrc/stable/accelerator.h>

#include "common/ascend_stream.h"
#include "pack/pack_ascend.h"
#include "pack/pack_torch.h"

namespace mdapo::pack {
namespace {

// Numbers where the kernel finds them.
Tensor upload(std::vector<int64_t>& numbers, const Tensor& like) {
  const auto count = static_cast<int64_t>(numbers.size());
  Tensor buffer = torch::stable::new_empty(like, {count}, torch::headeronly::ScalarType::Long);
  if (count > 0) {
    const auto type = torch::headeronly::ScalarType::Long;
    const torch::stable::Device host(torch::headeronly::DeviceType::CPU);
    const Tensor on_host = torch::stable::from_blob(numbers.data(), {count}, {1}, host, type);
    torch::stable::copy_(buffer, on_host);  // waits: `numbers` may go
  }
  return buffer;
}

std::vector<Tensor> copy(const std::vector<Tensor>& fields, const std::vector<Piece>& pieces, int64_t tokens) {
  const torch::stable::accelerator::DeviceGuard guard(fields[0].get_device_index());
  std::vector<int64_t> numbers;
  std::vector<Tensor> outputs;
  for (const Tensor& field : fields) {
    STD_TORCH_CHECK(field.get_device_index() == fields[0].get_device_index() && !field.is_cpu(),
                    "fields are on different devices");
    outputs.push_back(like(field, tokens));
    if (item_bytes(field) == 0) continue;
    numbers.push_back(reinterpret_cast<int64_t>(field.data_ptr()));
    numbers.push_back(reinterpret_cast<int64_t>(outputs.back().data_ptr()));
    numbers.push_back(item_bytes(field));
  }
  const auto num_fields = static_cast<int64_t>(numbers.size()) / kFieldNumbers;
  if (num_fields == 0 || tokens == 0) return outputs;
  for (const Piece& piece : pieces) numbers.insert(numbers.end(), {piece.to, piece.from, piece.count});
  const Tensor on_device = upload(numbers, fields[0]);
  const auto* data = static_cast<const int64_t*>(on_device.data_ptr());
  const auto num_pieces = static_cast<int64_t>(pieces.size());
  const AscendCopy job{data, data + num_fields * kFieldNumbers, num_fields, num_pieces, tokens};
  // Tensors are captured: their memory must not go to another before the launch has its turn.
  enqueue("mdapo_pack_copy", [=](void* stream) {
    (void)fields, (void)outputs, (void)on_device;
    launch_copy(job, vector_cores(), stream);
  });
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

}  // namespace
}  // namespace mdapo::pack

STABLE_TORCH_LIBRARY_IMPL(mdapo, PrivateUse1, m) {
  m.impl("pack", TORCH_BOX(&mdapo::pack::pack));
  m.impl("unpack", TORCH_BOX(&mdapo::pack::unpack));
}
