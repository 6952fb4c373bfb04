// The Ascend C kernels on the host twin, for tests/ops/ascend/twin.py: the kernels' own sources, included as they are.
#include "pack/pack_ascend_kernel.cpp"
#include "token_logprob/token_logprob_ascend_kernel.cpp"

#include <cstdio>

#include "pack/pack.h"

namespace {

// 0, or 1 with what the twin found in `message`.
template <class Run>
int guarded(char* message, int64_t size, Run&& run) {
  int failed = 0;
  try {
    run();
  } catch (const std::exception& error) {
    std::snprintf(message, static_cast<size_t>(size), "%s", error.what());
    failed = 1;
  }
  ascend_twin::machine().buffers.clear();
  return failed;
}

}  // namespace

// `shape`: rows, cols, row_stride, first_id, value_stride; `values` are the stats, or with `gradient` the terms.
extern "C" int token_logprob_ascend(int gradient, int bfloat16, void* logits, const int64_t* targets, float* values,
                                    const int64_t* shape, double temperature, int cores, int max_keeps_nan,
                                    char* message, int64_t message_size) {
  using namespace mdapo::token_logprob;
  const auto [rows, cols, row_stride, first_id, value_stride] = *reinterpret_cast<const int64_t(*)[5]>(shape);
  ascend_twin::machine().max_keeps_nan = max_keeps_nan != 0;
  const size_t item = bfloat16 ? 2 : 4;
  for (int64_t row = 0; row < rows; ++row)
    ascend_twin::add_buffer(static_cast<uint8_t*>(logits) + row * row_stride * static_cast<int64_t>(item), static_cast<size_t>(cols) * item);
  ascend_twin::add_buffer(targets, static_cast<size_t>(rows) * sizeof(int64_t));
  const int kinds = gradient ? static_cast<int>(kTermsRows) : static_cast<int>(kStatsRows);
  for (int kind = 0; kind < kinds; ++kind)
    ascend_twin::add_buffer(values + kind * value_stride, static_cast<size_t>(rows) * sizeof(float));
  const AscendTile job{{rows, cols, row_stride, first_id}, bfloat16 != 0, logits, targets, values, value_stride,
                       static_cast<float>(1 / temperature)};
  return guarded(message, message_size, [&] {
    const auto launch = gradient ? launch_gradient : launch_stats;
    launch(job, static_cast<uint32_t>(cores), nullptr);
  });
}

// `shape`: runs, rows, total, cp, cp_rank. Fields lie one after the other, `items` bytes a token.
extern "C" int pack_ascend(int unpack, int num_fields, const void* const* from, void* const* to, const int64_t* items,
                           const int64_t* runs, const int64_t* shape, int cores, char* message, int64_t message_size) {
  using namespace mdapo::pack;
  const auto [count, rows, total, cp, cp_rank] = *reinterpret_cast<const int64_t(*)[5]>(shape);
  return guarded(message, message_size, [&] {
    const Runs given{runs, runs + count, runs + 2 * count, runs + 3 * count, count};
    const Shard shard{cp, cp_rank};
    const auto pieces = unpack ? to_rows(given, shard, rows, total) : to_packed(given, shard, rows, total);
    const int64_t sources = unpack ? total / cp : rows, tokens = unpack ? rows : total / cp;
    std::vector<int64_t> fields, numbers;
    for (int f = 0; f < num_fields; ++f) {
      if (items[f] == 0) continue;
      fields.insert(fields.end(), {reinterpret_cast<int64_t>(from[f]), reinterpret_cast<int64_t>(to[f]), items[f]});
      ascend_twin::add_buffer(from[f], static_cast<size_t>(sources * items[f]));
      ascend_twin::add_buffer(to[f], static_cast<size_t>(tokens * items[f]));
    }
    for (const Piece& piece : pieces) numbers.insert(numbers.end(), {piece.to, piece.from, piece.count});
    if (fields.empty() || tokens == 0) return;
    ascend_twin::add_buffer(fields.data(), fields.size() * sizeof(int64_t));
    ascend_twin::add_buffer(numbers.data(), numbers.size() * sizeof(int64_t));
    launch_copy({fields.data(), numbers.data(), static_cast<int64_t>(fields.size()) / kFieldNumbers,
                 static_cast<int64_t>(pieces.size()), tokens},
                static_cast<uint32_t>(cores), nullptr);
  });
}
