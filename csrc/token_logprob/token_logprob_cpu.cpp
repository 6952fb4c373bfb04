// token_logprob on CPU: binds the row passes of token_logprob_cpu.h to torch's dispatcher, rows split over its threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>

#include "token_logprob/token_logprob_torch.h"
#include "token_logprob/token_logprob_cpu.h"

namespace mdapo::token_logprob {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kElementsPerThread = 1 << 15;  // less is not worth waking a thread for

const Isa kIsa = best_isa();

// Each row belongs to one thread, so that the number of threads changes no bit.
template <class F>
void for_rows(const Tile& tile, const F& body) {
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, tile.cols));
  torch::stable::parallel_for(0, tile.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

template <class T>
void stats_rows(const Tile& tile, double temperature, const T* logits, const int64_t* targets, Accumulator<T>* stats,
                int64_t stride) {
  using A = Accumulator<T>;
  const A scale = A(1 / temperature);
  const RowKernels<T> kernels = row_kernels<T>(kIsa);
  for_rows(tile, [&](int64_t row) {
    const T* z = logits + row_offset(tile, row);
    A* own = stats + row;
    const Partial<A> before{own[kLargest * stride], own[kSum * stride], own[kMoment * stride]};
    const Partial<A> now = merged(before, kernels.stats(z, tile.cols, scale));
    own[kLargest * stride] = now.largest;
    own[kSum * stride] = now.sum;
    own[kMoment * stride] = now.moment;
    const int64_t column = column_of(tile, targets[row]);
    if (column >= 0) own[kTarget * stride] = to_float(z[column]) * scale;
  });
}

template <class T>
void gradient_rows(const Tile& tile, double temperature, T* logits, const int64_t* targets, const Accumulator<T>* terms,
                   int64_t stride) {
  using A = Accumulator<T>;
  const A scale = A(1 / temperature);
  const RowKernels<T> kernels = row_kernels<T>(kIsa);
  for_rows(tile, [&](int64_t row) {
    const A* own = terms + row;
    const RowTerms<A> of_row{own[kBase * stride], own[kLogSum * stride], own[kEntropy * stride],
                             own[kGradLogp * stride], own[kGradEntropy * stride]};
    kernels.gradient(logits + row_offset(tile, row), tile.cols, scale, of_row, column_of(tile, targets[row]));
  });
}

void write_stats(Tensor stats_4R, Tensor logits_RC, Tensor targets_R, int64_t first_id, double temperature) {
  const Tile tile = checked_tile(stats_4R, kStatsRows, logits_RC, targets_R, first_id, temperature);
  const auto run = [&](auto type) {
    using T = decltype(type);
    stats_rows(tile, temperature, static_cast<const T*>(logits_RC.const_data_ptr()),
               static_cast<const int64_t*>(targets_R.const_data_ptr()),
               static_cast<Accumulator<T>*>(stats_4R.mutable_data_ptr()), stats_4R.stride(0));
  };
  switch (logits_RC.scalar_type()) {
    case ScalarType::Float:
      return run(float{});
    case ScalarType::BFloat16:
      return run(Bf16{});
    default:
      return run(double{});
  }
}

void write_gradient(Tensor logits_RC, Tensor targets_R, Tensor terms_5R, int64_t first_id, double temperature) {
  const Tile tile = checked_tile(terms_5R, kTermsRows, logits_RC, targets_R, first_id, temperature);
  const auto run = [&](auto type) {
    using T = decltype(type);
    gradient_rows(tile, temperature, static_cast<T*>(logits_RC.mutable_data_ptr()),
                  static_cast<const int64_t*>(targets_R.const_data_ptr()),
                  static_cast<const Accumulator<T>*>(terms_5R.const_data_ptr()), terms_5R.stride(0));
  };
  switch (logits_RC.scalar_type()) {
    case ScalarType::Float:
      return run(float{});
    case ScalarType::BFloat16:
      return run(Bf16{});
    default:
      return run(double{});
  }
}

}  // namespace
}  // namespace mdapo::token_logprob

STABLE_TORCH_LIBRARY_IMPL(mdapo, CPU, m) {
  m.impl("token_logprob_stats", TORCH_BOX(&mdapo::token_logprob::write_stats));
  m.impl("token_logprob_grad", TORCH_BOX(&mdapo::token_logprob::write_gradient));
}
