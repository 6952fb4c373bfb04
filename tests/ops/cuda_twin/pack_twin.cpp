// pack's CUDA kernels on the host twin, for tests/ops/cuda_twin/pack_twin.py. Buffers are given with their sizes.
#include "pack/pack_cuda.cu"

using namespace mdapo::pack;

namespace {

void launch_fields(const std::vector<Piece>& pieces, int count, const uint8_t* const* from, uint8_t* const* to,
                   const int64_t* items, int64_t source_tokens, int64_t tokens) {
  auto& buffers = twin::machine().buffers;
  CopyJob job{};
  job.pieces = pieces.data();
  job.num_pieces = static_cast<int64_t>(pieces.size());
  for (int f = 0; f < count; ++f) {
    const int64_t item = items[f], bytes = item * tokens;
    if (bytes == 0) continue;
    buffers.push_back({from[f], from[f] + item * source_tokens});
    if (job.num_fields == kMaxFields) {
      launch_copy(job, nullptr);
      job.num_fields = 0;
      job.num_blocks = 0;
    }
    job.fields[job.num_fields++] = {from[f],       to[f], item * source_tokens, bytes, static_cast<uint32_t>(item),
                                    job.num_blocks};
    job.num_blocks += static_cast<uint32_t>((bytes + kTileBytes - 1) / kTileBytes);
  }
  launch_copy(job, nullptr);
  buffers.clear();
}

}  // namespace

// rows and total as in the op; to_rows: unpack. Returns 0, or 1 with what is wrong with the runs in `message`.
extern "C" int pack_twin(int unpack, int count, const uint8_t* const* from, uint8_t* const* to, const int64_t* items,
                         const int64_t* runs, int64_t num_runs, int64_t rows, int64_t total, int64_t cp,
                         int64_t cp_rank, char* message, int64_t message_size) {
  const Runs columns{runs, runs + num_runs, runs + 2 * num_runs, runs + 3 * num_runs, num_runs};
  try {
    if (unpack != 0) {
      launch_fields(to_rows(columns, {cp, cp_rank}, rows, total), count, from, to, items, total / cp, rows);
    } else {
      launch_fields(to_packed(columns, {cp, cp_rank}, rows, total), count, from, to, items, rows, total / cp);
    }
  } catch (const std::invalid_argument& error) {
    std::snprintf(message, static_cast<size_t>(message_size), "%s", error.what());
    return 1;
  }
  return 0;
}

extern "C" void mask_spans_twin(const uint8_t* mask, int64_t* spans, int64_t rows, int64_t size) {
  twin::machine().buffers.push_back({mask, mask + rows * size});
  launch_mask_spans(mask, spans, rows, size, nullptr);
  twin::machine().buffers.clear();
}
