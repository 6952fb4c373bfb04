// token_logprob: what the bindings of all torch backends check before a kernel runs.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "token_logprob/token_logprob.h"

namespace mdapo::token_logprob {

using torch::stable::Tensor;

// `values_KR`: the stats or the terms, K numbers for each row; float64 for float64 logits and float32 otherwise.
inline Tile checked_tile(const Tensor& values_KR, int64_t kinds, const Tensor& logits_RC, const Tensor& targets_R,
                         int64_t first_id, double temperature) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(logits_RC.dim() == 2 && targets_R.dim() == 1 && values_KR.dim() == 2,
                  "token_logprob: logits [R, C], targets [R] and values [K, R]");
  const int64_t rows = logits_RC.size(0), cols = logits_RC.size(1);
  STD_TORCH_CHECK(targets_R.size(0) == rows && values_KR.size(0) == kinds && values_KR.size(1) == rows,
                  "token_logprob: ", rows, " rows of logits, but ", targets_R.size(0), " targets and [",
                  values_KR.size(0), ", ", values_KR.size(1), "] values");
  const ScalarType type = logits_RC.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Double,
                  "token_logprob: logits in float32, bfloat16 or float64");
  STD_TORCH_CHECK(values_KR.scalar_type() == (type == ScalarType::Double ? type : ScalarType::Float),
                  "token_logprob: the values of a row are float32 (float64 for float64 logits)");
  STD_TORCH_CHECK(targets_R.scalar_type() == ScalarType::Long, "token_logprob: targets are int64");
  STD_TORCH_CHECK((cols <= 1 || logits_RC.stride(1) == 1) && (rows <= 1 || logits_RC.stride(0) >= cols),
                  "token_logprob: the columns of a row of logits are adjacent, and rows do not overlap");
  STD_TORCH_CHECK(rows <= 1 || (targets_R.stride(0) == 1 && values_KR.stride(1) == 1),
                  "token_logprob: targets, and each kind of value, are contiguous");
  STD_TORCH_CHECK(first_id >= 0 && temperature > 0, "token_logprob: first_id >= 0 and temperature > 0");
  return {rows, cols, logits_RC.stride(0), first_id};
}

}  // namespace mdapo::token_logprob
