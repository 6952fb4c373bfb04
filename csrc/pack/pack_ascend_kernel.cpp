// pack and unpack on Ascend: a vector core fills a range of destination tokens of every field, through UB.
//
// Nothing is computed, and no address in GM has to be aligned (DataCopyPad moves exactly what it is told). Two buffers,
// so that one is filled while the other is emptied; zeros come from a third that is cleared once.
#include "common/ascend_kernel.h"

#include "pack/pack_ascend.h"

namespace mdapo::pack {
namespace {

constexpr int64_t kChunk = 64 * 1024;  // bytes of one transfer
constexpr int64_t kZeros = 32 * 1024;

__aicore__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__aicore__ inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// The list of pieces in GM, sorted by where they go.
class Pieces {
 public:
  __aicore__ inline Pieces(GM_ADDR pieces, int64_t count) : count(count) {
    numbers.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(pieces));
  }
  __aicore__ inline int64_t to(int64_t i) const { return numbers.GetValue(kPieceNumbers * i); }
  __aicore__ inline int64_t from(int64_t i) const { return numbers.GetValue(kPieceNumbers * i + 1); }
  __aicore__ inline int64_t size(int64_t i) const { return numbers.GetValue(kPieceNumbers * i + 2); }

  // The first piece that ends behind `token`.
  __aicore__ inline int64_t first(int64_t token) const {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (to(middle) + size(middle) > token) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  const int64_t count;

 private:
  AscendC::GlobalTensor<int64_t> numbers;
};

class Copy {
 public:
  __aicore__ inline explicit Copy(AscendC::TPipe& pipe) {
    pipe.InitBuffer(chunks, 2, kChunk);
    pipe.InitBuffer(zeros_buffer, kZeros);
    AscendC::Duplicate(zeros_buffer.Get<int32_t>(), 0, static_cast<int32_t>(kZeros / sizeof(int32_t)));
    zeros = zeros_buffer.Get<uint8_t>();
    wait_for<AscendC::HardEvent::V_MTE3>();
  }

  // Tokens [begin, end) of one field's destination.
  __aicore__ inline void field(GM_ADDR source, GM_ADDR destination, int64_t item, const Pieces& pieces, int64_t begin,
                               int64_t end) {
    from.SetGlobalBuffer(source);
    to.SetGlobalBuffer(destination);
    int64_t at = begin;
    for (int64_t i = pieces.first(begin); i < pieces.count && at < end; ++i) {
      const int64_t start = pieces.to(i);
      const int64_t first = smaller(larger(start, begin), end), last = smaller(start + pieces.size(i), end);
      clear(at * item, (first - at) * item);
      if (last > first) move(first * item, (pieces.from(i) + first - start) * item, (last - first) * item);
      at = larger(first, last);
    }
    clear(at * item, (end - at) * item);
  }

 private:
  __aicore__ inline void move(int64_t target, int64_t source, int64_t bytes) {
    for (int64_t done = 0; done < bytes; done += kChunk) {
      const AscendC::DataCopyExtParams block{1, static_cast<uint32_t>(smaller(kChunk, bytes - done)), 0, 0, 0};
      AscendC::LocalTensor<uint8_t> chunk = chunks.AllocTensor<uint8_t>();
      AscendC::DataCopyPad(chunk, from[source + done], block, AscendC::DataCopyPadExtParams<uint8_t>{false, 0, 0, 0});
      chunks.EnQue(chunk);
      chunk = chunks.DeQue<uint8_t>();
      AscendC::DataCopyPad(to[target + done], chunk, block);
      chunks.FreeTensor(chunk);
    }
  }

  __aicore__ inline void clear(int64_t target, int64_t bytes) {
    for (int64_t done = 0; done < bytes; done += kZeros) {
      const auto size = static_cast<uint32_t>(smaller(kZeros, bytes - done));
      AscendC::DataCopyPad(to[target + done], zeros, AscendC::DataCopyExtParams{1, size, 0, 0, 0});
    }
  }

  AscendC::GlobalTensor<uint8_t> from, to;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> chunks;
  AscendC::TBuf<AscendC::TPosition::VECCALC> zeros_buffer;
  AscendC::LocalTensor<uint8_t> zeros;
};

}  // namespace
}  // namespace mdapo::pack

extern "C" __global__ __aicore__ void mdapo_pack_copy(GM_ADDR fields, GM_ADDR pieces, int64_t num_fields,
                                                      int64_t num_pieces, int64_t tokens) {
  using namespace mdapo::pack;
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  Copy copy(pipe);
  const Pieces list(pieces, num_pieces);
  AscendC::GlobalTensor<int64_t> numbers;
  numbers.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(fields));
  const int64_t cores = AscendC::GetBlockNum(), each = (tokens + cores - 1) / cores;
  const int64_t begin = smaller(tokens, each * AscendC::GetBlockIdx()), end = smaller(tokens, begin + each);
  if (begin == end) return;
  for (int64_t f = 0; f < num_fields; ++f) {
    const auto source = reinterpret_cast<GM_ADDR>(numbers.GetValue(kFieldNumbers * f));
    const auto destination = reinterpret_cast<GM_ADDR>(numbers.GetValue(kFieldNumbers * f + 1));
    copy.field(source, destination, numbers.GetValue(kFieldNumbers * f + 2), list, begin, end);
  }
}

namespace mdapo::pack {

void launch_copy(const AscendCopy& job, uint32_t cores, void* stream) {
  MDAPO_LAUNCH(mdapo_pack_copy, cores, stream, reinterpret_cast<GM_ADDR>(const_cast<int64_t*>(job.fields)),
               reinterpret_cast<GM_ADDR>(const_cast<int64_t*>(job.pieces)), job.num_fields, job.num_pieces, job.tokens);
}

}  // namespace mdapo::pack
