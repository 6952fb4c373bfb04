// token_logprob on Ascend: which rows are a core's, and logits from GM as float32.
#pragma once

#include "common/ascend_kernel.h"

#include "token_logprob/token_logprob_tile.h"

namespace mdapo::token_logprob {

constexpr int32_t kChunk = 4096;  // columns in UB at once

using Floats = AscendC::LocalTensor<float>;

__aicore__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

__aicore__ inline float to_float(float v) { return v; }
__aicore__ inline float to_float(bfloat16_t v) { return AscendC::ToFloat(v); }

// The rows of this core, [begin, end).
struct Share {
  int64_t begin, end;

  __aicore__ inline explicit Share(int64_t rows) {
    const int64_t cores = AscendC::GetBlockNum(), each = (rows + cores - 1) / cores;
    begin = smaller(rows, each * AscendC::GetBlockIdx());
    end = smaller(rows, begin + each);
  }
};

// Logits from GM as float32 x = logit / temperature, fetched ahead of their use.
template <class T>
class Reader {
 public:
  __aicore__ inline Reader(AscendC::TPipe& pipe, const Tile& tile, GM_ADDR logits, float scale)
      : tile(tile), scale(scale) {
    from.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(logits));
    pipe.InitBuffer(queue, 2, kChunk * sizeof(T));
  }

  __aicore__ inline int64_t chunks() const { return (tile.cols + kChunk - 1) / kChunk; }
  __aicore__ inline int32_t columns(int64_t chunk) const {
    return static_cast<int32_t>(smaller(kChunk, tile.cols - chunk * kChunk));
  }
  __aicore__ inline int64_t place(int64_t row, int64_t column) const { return row_offset(tile, row) + column; }

  __aicore__ inline void fetch(int64_t row, int64_t chunk) {
    const auto bytes = static_cast<uint32_t>(columns(chunk) * sizeof(T));
    AscendC::LocalTensor<T> logits = queue.template AllocTensor<T>();
    AscendC::DataCopyPad(logits, from[place(row, chunk * kChunk)], AscendC::DataCopyExtParams{1, bytes, 0, 0, 0},
                         AscendC::DataCopyPadExtParams<T>{false, 0, 0, T{}});
    queue.EnQue(logits);
  }

  // The chunk that was fetched first.
  __aicore__ inline void take(const Floats& x, int32_t count) {
    AscendC::LocalTensor<T> logits = queue.template DeQue<T>();
    then();
    widen(x, logits, count);
    queue.FreeTensor(logits);
    then();
  }
  __aicore__ inline void skip() {
    AscendC::LocalTensor<T> logits = queue.template DeQue<T>();
    queue.FreeTensor(logits);
  }

  // x of one column, through the scalar unit.
  __aicore__ inline float at(int64_t row, int64_t column) const {
    return to_float(from.GetValue(place(row, column))) * scale;
  }

  AscendC::GlobalTensor<T> from;
  const Tile tile;
  const float scale;

 private:
  __aicore__ inline void widen(const Floats& x, const AscendC::LocalTensor<float>& logits, int32_t count) {
    AscendC::Muls(x, logits, scale, count);
  }
  __aicore__ inline void widen(const Floats& x, const AscendC::LocalTensor<bfloat16_t>& logits, int32_t count) {
    AscendC::Cast(x, logits, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(count));
    then();
    AscendC::Muls(x, x, scale, count);
  }

  AscendC::TQue<AscendC::TPosition::VECIN, 2> queue;
};

}  // namespace mdapo::token_logprob
