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

struct TileShape {
  int64_t rows, cols, row_stride, first_id, value_stride;
};

struct PackShape {
  int64_t runs, rows, total, cp, cp_rank;
};

// `values` are the stats, or with `gradient` the terms.
extern "C" int token_logprob_ascend(int gradient, int bfloat16, void* logits, const int64_t* targets, float* values,
                                    const TileShape* shape, double temperature, int cores, int max_keeps_nan,
                                    char* message, int64_t message_size) {
  using namespace mdapo::token_logprob;
  const TileShape of = *shape;
  ascend_twin::machine().max_keeps_nan = max_keeps_nan != 0;
  const size_t item = bfloat16 ? 2 : 4;
  for (int64_t row = 0; row < of.rows; ++row) {
    const int64_t begin = row * of.row_stride * static_cast<int64_t>(item);
    ascend_twin::add_buffer(static_cast<uint8_t*>(logits) + begin, static_cast<size_t>(of.cols) * item);
  }
  ascend_twin::add_buffer(targets, static_cast<size_t>(of.rows) * sizeof(int64_t));
  const int kinds = gradient ? static_cast<int>(kTermsRows) : static_cast<int>(kStatsRows);
  for (int kind = 0; kind < kinds; ++kind)
    ascend_twin::add_buffer(values + kind * of.value_stride, static_cast<size_t>(of.rows) * sizeof(float));
  const AscendTile job{{of.rows, of.cols, of.row_stride, of.first_id},
                       bfloat16 != 0,
                       logits,
                       targets,
                       values,
                       of.value_stride,
                       static_cast<float>(1 / temperature)};
  return guarded(message, message_size, [&] {
    const auto launch = gradient ? launch_gradient : launch_stats;
    launch(job, static_cast<uint32_t>(cores), nullptr);
  });
}

// Fields of `items` bytes a token.
extern "C" int pack_ascend(int unpack, int num_fields, const void* const* from, void* const* to, const int64_t* items,
                           const int64_t* runs, const PackShape* shape, int cores, char* message,
                           int64_t message_size) {
  using namespace mdapo::pack;
  const PackShape of = *shape;
  return guarded(message, message_size, [&] {
    const Runs given{runs, runs + of.runs, runs + 2 * of.runs, runs + 3 * of.runs, of.runs};
    const Shard shard{of.cp, of.cp_rank};
    const auto pieces = unpack ? to_rows(given, shard, of.rows, of.total) : to_packed(given, shard, of.rows, of.total);
    const int64_t own = of.total / of.cp, sources = unpack ? own : of.rows, tokens = unpack ? of.rows : own;
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
