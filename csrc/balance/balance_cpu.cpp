// balance_partition and balance_plan, on the host. Schemas and fakes are in mdapo/ops/balance.py.
#include "balance/balance.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace mdapo::balance {
namespace {

using torch::stable::Tensor;

// The numbers of an int64 [N] tensor, made contiguous in place.
const int64_t* numbers(const char* name, Tensor& values, int64_t n) {
  STD_TORCH_CHECK(
      values.dim() == 1 && values.size(0) == n && values.scalar_type() == torch::headeronly::ScalarType::Long, name,
      ": int64 [N]");
  if (!values.is_contiguous()) values = torch::stable::contiguous(values);
  return static_cast<const int64_t*>(values.data_ptr());
}

int64_t* data(const Tensor& values) { return static_cast<int64_t*>(values.data_ptr()); }

std::tuple<Tensor, Tensor> balance_partition(Tensor costs, int64_t k, bool equal_size) {
  const int64_t n = costs.dim() == 1 ? costs.size(0) : 0;
  const int64_t* cost = numbers("costs", costs, n);
  STD_TORCH_CHECK(k >= 1, "k: at least 1");
  Tensor items = torch::stable::new_empty(costs, {n}), ends = torch::stable::new_empty(costs, {k});
  partition(cost, n, k, equal_size, data(items), data(ends));
  return {items, ends};
}

std::tuple<Tensor, Tensor, Tensor> balance_plan(Tensor tokens, Tensor costs, Tensor mini, int64_t minis, int64_t dp,
                                                int64_t cap, int64_t rows, int64_t multiple, int64_t at_least,
                                                bool lockstep, bool equal_size) {
  const int64_t n = tokens.dim() == 1 ? tokens.size(0) : 0;
  STD_TORCH_CHECK(minis >= 0, "minis: at least 0");
  const int64_t *token = numbers("tokens", tokens, n), *cost = numbers("costs", costs, n),
                *of = numbers("mini", mini, n);
  Tensor rank = torch::stable::new_empty(tokens, {n}), micro = torch::stable::new_empty(tokens, {n});
  Tensor count = torch::stable::new_empty(tokens, {minis});
  plan(token, cost, of, n, minis, {dp, cap, rows, multiple, at_least, lockstep, equal_size}, data(rank), data(micro),
       data(count));
  return {rank, micro, count};
}

}  // namespace
}  // namespace mdapo::balance

STABLE_TORCH_LIBRARY_IMPL(mdapo, CPU, m) {
  m.impl("balance_partition", TORCH_BOX(&mdapo::balance::balance_partition));
  m.impl("balance_plan", TORCH_BOX(&mdapo::balance::balance_plan));
}
