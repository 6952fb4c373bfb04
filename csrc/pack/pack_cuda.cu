// pack and unpack as one kernel: every thread fills 16-byte words of the destination from wherever they come.
//
// A block fills one tile of one field. It looks up once which pieces meet the tile (mostly one or two), so that a
// thread's own search is over those only. Loads are 16 bytes too: a source that lies askew is read as two aligned
// words, shifted.
#include "pack/pack_cuda.h"

namespace mdapo::pack {
namespace {

constexpr int kThreads = 256;
constexpr int kWordBytes = 16;
constexpr int kWarp = 32;

// Bytes [4 * Q + shift / 8, ...) of eight words; Q is a constant, so that nothing is indexed in memory.
template <int Q>
__device__ __forceinline__ uint4 shifted(const uint32_t (&w)[8], uint32_t shift) {
  return make_uint4(__funnelshift_r(w[Q], w[Q + 1], shift), __funnelshift_r(w[Q + 1], w[Q + 2], shift),
                    __funnelshift_r(w[Q + 2], w[Q + 3], shift), __funnelshift_r(w[Q + 3], w[Q + 4], shift));
}

// 16 bytes at `at`, of a buffer that ends at `end`: only aligned words that lie inside it are read as such.
__device__ __forceinline__ bool load_word(const uint8_t* at, const uint8_t* begin, const uint8_t* end, uint4* word) {
  const auto askew = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at) % kWordBytes);
  const auto* aligned = at - askew;
  if (askew == 0) {
    *word = __ldg(reinterpret_cast<const uint4*>(aligned));
    return true;
  }
  if (aligned < begin || aligned + 2 * kWordBytes > end) return false;
  const uint4 low = __ldg(reinterpret_cast<const uint4*>(aligned));
  const uint4 high = __ldg(reinterpret_cast<const uint4*>(aligned) + 1);
  const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const uint32_t shift = askew % 4 * 8;
  switch (askew / 4) {
    case 0:
      *word = shifted<0>(w, shift);
      break;
    case 1:
      *word = shifted<1>(w, shift);
      break;
    case 2:
      *word = shifted<2>(w, shift);
      break;
    default:
      *word = shifted<3>(w, shift);
      break;
  }
  return true;
}

// Bytes one by one: where pieces meet, at the field's end, at the source's edges. `i` is the piece of the first byte.
__device__ void copy_bytes(const DeviceField& field, const Piece* pieces, int64_t i, int64_t num_pieces, int64_t at,
                           int64_t end) {
  const int64_t item = field.item;
  for (; at < end; ++at) {
    while (i < num_pieces && at >= (pieces[i].to + pieces[i].count) * item) ++i;
    const bool copied = i < num_pieces && at >= pieces[i].to * item;
    field.to[at] = copied ? field.from[(pieces[i].from - pieces[i].to) * item + at] : uint8_t{0};
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyJob job) {
  int f = 0;
  while (f + 1 < job.num_fields && blockIdx.x >= job.fields[f + 1].first_block) ++f;
  const DeviceField& field = job.fields[f];
  const int64_t tile = static_cast<int64_t>(blockIdx.x - field.first_block) * kTileBytes;
  const int64_t tile_end = min(tile + kTileBytes, field.to_bytes);
  const int64_t item = field.item, token = tile / item;
  const auto within = static_cast<uint32_t>(tile - token * item);  // bytes of `token` before the tile

  __shared__ int64_t range[2];
  if (threadIdx.x == 0) range[0] = first_piece(job.pieces, job.num_pieces, token);
  if (threadIdx.x == kWarp) {
    const int64_t behind = first_piece(job.pieces, job.num_pieces, (tile_end - 1) / item);
    range[1] = min(behind + 1, job.num_pieces);
  }
  __syncthreads();
  const int64_t low = range[0], high = range[1];

#pragma unroll 4
  for (uint32_t local = threadIdx.x * kWordBytes; local < kTileBytes; local += kThreads * kWordBytes) {
    const int64_t at = tile + local;
    if (at >= tile_end) return;
    const int64_t i = low + first_piece(job.pieces + low, high - low, token + (within + local) / field.item);
    const int64_t word_end = at + kWordBytes;
    const int64_t begin = i < high ? job.pieces[i].to * item : INT64_MAX;
    const int64_t end = i < high ? begin + job.pieces[i].count * item : INT64_MAX;
    uint4 word = make_uint4(0, 0, 0, 0);
    bool whole = word_end <= field.to_bytes;
    if (whole && at >= begin && word_end <= end) {
      const uint8_t* source = field.from + job.pieces[i].from * item + (at - begin);
      whole = load_word(source, field.from, field.from + field.from_bytes, &word);
    } else {
      whole = whole && word_end <= begin;  // zeros
    }
    if (whole) {
      *reinterpret_cast<uint4*>(field.to + at) = word;
    } else {
      copy_bytes(field, job.pieces, i, high, at, min(word_end, field.to_bytes));
    }
  }
}

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    mask_spans_kernel(const uint8_t* mask, int64_t* spans, int64_t rows, int64_t size) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (row >= rows) return;
  const auto lane = static_cast<uint32_t>(threadIdx.x % kWarp);
  const uint8_t* bytes = mask + row * size;
  long long first = size, end = 0, ones = 0;
  const auto see = [&](int64_t at) {
    if (__ldg(bytes + at) != 0) {
      first = first < at ? first : at;
      end = at + 1;
      ++ones;
    }
  };
  const int64_t head = min(size, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(bytes) % kWordBytes));
  const int64_t words = (size - head) / kWordBytes;
  if (lane < head) see(lane);
  for (int64_t w = lane; w < words; w += kWarp) {
    const int64_t at = head + w * kWordBytes;
    const uint4 word = __ldg(reinterpret_cast<const uint4*>(bytes + at));
    if ((word.x | word.y | word.z | word.w) == 0) continue;
    for (int k = 0; k < kWordBytes; ++k) see(at + k);
  }
  if (const int64_t at = head + words * kWordBytes + lane; at < size) see(at);
  for (int step = kWarp / 2; step > 0; step /= 2) {
    first = min(first, __shfl_xor_sync(~0u, first, step));
    end = max(end, __shfl_xor_sync(~0u, end, step));
    ones += __shfl_xor_sync(~0u, ones, step);
  }
  if (lane == 0) {
    spans[row] = ones == 0 ? 0 : first;
    spans[rows + row] = end;
    spans[2 * rows + row] = ones != 0 && ones != end - first ? 1 : 0;
  }
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), uint32_t blocks, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace

cudaError_t launch_copy(const CopyJob& job, cudaStream_t stream) {
  return job.num_blocks == 0 ? cudaSuccess : launch(copy_kernel, job.num_blocks, stream, job);
}

cudaError_t launch_mask_spans(const uint8_t* mask, int64_t* spans, int64_t rows, int64_t size, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const int64_t blocks = (rows * kWarp + kThreads - 1) / kThreads;
  return launch(mask_spans_kernel, static_cast<uint32_t>(blocks), stream, mask, spans, rows, size);
}

}  // namespace mdapo::pack
