// pack, unpack and mask_spans on the CPU. Schemas, fakes and gradients are in mdapo/ops/pack.py.
#include "pack/pack_cpu.h"

#include "pack/pack_torch.h"

namespace mdapo::pack {
namespace {

constexpr int64_t kGrainBytes = 1 << 18;   // less is not worth another thread
constexpr int64_t kStreamBytes = 4 << 20;  // more does not stay in a core's own cache
constexpr int64_t kFetchBytes = 4096;      // of the next row: the hardware does not look over the end of a page

std::vector<Tensor> copy(const std::vector<Tensor>& fields, const std::vector<Piece>& pieces, int64_t tokens) {
  std::vector<Tensor> outputs;
  std::vector<Field> copied;
  int64_t bytes = 0;  // of a token, in all fields
  for (const Tensor& field : fields) {
    outputs.push_back(like(field, tokens));
    const int64_t item = item_bytes(field);
    if (item == 0) continue;
    copied.push_back(
        {static_cast<const uint8_t*>(field.data_ptr()), static_cast<uint8_t*>(outputs.back().data_ptr()), item});
    bytes += item;
  }
  torch::stable::parallel_for(
      0, tokens, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes)),
      [&](int64_t begin, int64_t end) { copy_range(copied, pieces, begin, end, bytes * tokens >= kStreamBytes); });
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
  const int64_t rows = mask.size(0), size = mask.size(1);
  Tensor spans = torch::stable::new_empty(mask, {3, rows}, torch::headeronly::ScalarType::Long);
  auto* first = static_cast<int64_t*>(spans.data_ptr());
  const auto* data = static_cast<const uint8_t*>(mask.data_ptr());
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, size));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (b + 1 < end) fetch(data + (b + 1) * size, std::min(size, kFetchBytes));
      first[2 * rows + b] = mask_span(data + b * size, size, first + b, first + rows + b) ? 1 : 0;
    }
  });
  return spans;
}

}  // namespace
}  // namespace mdapo::pack

STABLE_TORCH_LIBRARY_IMPL(mdapo, CPU, m) {
  m.impl("pack", TORCH_BOX(&mdapo::pack::pack));
  m.impl("unpack", TORCH_BOX(&mdapo::pack::unpack));
  m.impl("mask_spans", TORCH_BOX(&mdapo::pack::mask_spans));
}
