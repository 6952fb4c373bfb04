// prefix_sizes, on the host. Schema and fake are in mdapo/ops/prefix.py.
#include "prefix/prefix.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace mdapo::prefix {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrain = 256;  // bundles; fewer are not worth another thread

template <class T>
const T* numbers(const char* name, Tensor& values, ScalarType type) {
  STD_TORCH_CHECK(values.dim() == 1 && values.scalar_type() == type, name, ": int64 [N], and ids int32 [P]");
  if (!values.is_contiguous()) values = torch::stable::contiguous(values);
  return static_cast<const T*>(values.data_ptr());
}

std::tuple<Tensor, Tensor, Tensor> prefix_sizes(Tensor ids, Tensor starts, Tensor lengths, Tensor ends, int64_t least) {
  Batch batch{};
  batch.ids = numbers<int32_t>("ids", ids, ScalarType::Int);
  batch.starts = numbers<int64_t>("starts", starts, ScalarType::Long);
  batch.lengths = numbers<int64_t>("lengths", lengths, ScalarType::Long);
  batch.ends = numbers<int64_t>("ends", ends, ScalarType::Long);
  batch.tokens = ids.size(0), batch.rows = starts.size(0), batch.bundles = ends.size(0);
  STD_TORCH_CHECK(lengths.size(0) == batch.rows, "starts and lengths differ in size");
  require_valid(batch, least);
  Tensor order = torch::stable::new_empty(starts, {batch.rows});
  Tensor tokens = torch::stable::new_empty(starts, {batch.bundles}),
         squares = torch::stable::new_empty(starts, {batch.bundles});
  auto *order_N = static_cast<int64_t*>(order.data_ptr()), *tokens_B = static_cast<int64_t*>(tokens.data_ptr());
  auto* squares_B = static_cast<int64_t*>(squares.data_ptr());
  torch::stable::parallel_for(0, batch.bundles, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Size size = measure(batch, b, least, order_N);
      tokens_B[b] = size.tokens;
      squares_B[b] = size.squares;
    }
  });
  return {order, tokens, squares};
}

}  // namespace
}  // namespace mdapo::prefix

STABLE_TORCH_LIBRARY_IMPL(mdapo, CPU, m) { m.impl("prefix_sizes", TORCH_BOX(&mdapo::prefix::prefix_sizes)); }
