// What the bindings of all devices share: runs and fields out of tensors, outputs of the right shape.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "pack/pack.h"

namespace mdapo::pack {

using torch::stable::Tensor;

// The columns of runs_4N, int64 [4, N] on the host; the tensor must outlive what is returned.
inline Runs runs_of(const Tensor& runs) {
  STD_TORCH_CHECK(runs.dim() == 2 && runs.size(0) == 4 && runs.is_cpu() && runs.is_contiguous() &&
                      runs.scalar_type() == torch::headeronly::ScalarType::Long,
                  "runs: int64 [4, N] on the host, contiguous");
  const auto* data = static_cast<const int64_t*>(runs.data_ptr());
  const int64_t count = runs.size(1);
  return {data, data + count, data + 2 * count, data + 3 * count, count};
}

inline std::vector<Tensor> contiguous(std::vector<Tensor> fields) {
  for (Tensor& field : fields) {
    if (!field.is_contiguous()) field = torch::stable::contiguous(field);
  }
  return fields;
}

// The tokens (first dimension) that all fields have.
inline int64_t tokens_of(const std::vector<Tensor>& fields) {
  STD_TORCH_CHECK(!fields.empty(), "no fields");
  for (const Tensor& field : fields) {
    STD_TORCH_CHECK(field.dim() >= 1 && field.size(0) == fields[0].size(0), "fields differ in their number of tokens");
  }
  return fields[0].size(0);
}

// As `field`, with `tokens` of them; not initialised.
inline Tensor like(const Tensor& field, int64_t tokens) {
  std::vector<int64_t> shape(field.sizes().begin(), field.sizes().end());
  shape[0] = tokens;
  return torch::stable::new_empty(field, shape);
}

inline int64_t item_bytes(const Tensor& field) {
  int64_t bytes = static_cast<int64_t>(field.element_size());
  for (int64_t d = 1; d < field.dim(); ++d) bytes *= field.size(d);
  return bytes;
}

}  // namespace mdapo::pack
