// token_logprob on Ascend: a vector core takes neighbouring rows of the tile and reads each once, a chunk at a time.
//
// Numbers of a row lie in UB as the first of a 32-byte block (a slot), so that every address is aligned and the sums of
// a batch of rows merge in a few vector instructions; transfers spread and gather them. Chunks are fetched one ahead.
// What a maximum makes of NaN is not documented: exponentials are taken of unbounded numbers, so that NaN reaches sums
// and gradients by addition and multiplication alone.
#include "common/ascend_kernel.h"

#include "token_logprob/token_logprob_ascend.h"
#include "token_logprob/token_logprob_ascend_kernel_reader.h"

namespace mdapo::token_logprob {
namespace {

constexpr int32_t kBatch = 64;                  // rows whose numbers are in UB at once
constexpr int32_t kSlot = 8;                    // float32 of a slot
constexpr int32_t kSlots = kBatch * kSlot;      // of one kind of number
constexpr int32_t kWork = 2 * kChunk / 64;      // a reduction keeps two numbers for each instruction
constexpr float kSmallest = -3.402823466e+38F;  // of finite numbers
constexpr uint32_t kFloat = sizeof(float);

template <class T>
class Stats {
 public:
  __aicore__ inline Stats(AscendC::TPipe& pipe, const Tile& tile, GM_ADDR logits, GM_ADDR targets, GM_ADDR stats,
                          int64_t stride, float scale)
      : reader(pipe, tile, logits, scale), stride(stride) {
    ids.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(targets));
    kept.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(stats));
    pipe.InitBuffer(loads, 1, kStatsRows * kSlots * kFloat);
    pipe.InitBuffer(stores, 1, kStatsRows * kSlots * kFloat);
    pipe.InitBuffer(x_buffer, kChunk * kFloat);
    pipe.InitBuffer(exp_buffer, kChunk * kFloat);
    pipe.InitBuffer(work_buffer, kWork * kFloat);
    pipe.InitBuffer(sums_buffer, kStatsRows * kSlots * kFloat);
    pipe.InitBuffer(part_buffer, 3 * kSlots * kFloat);
    pipe.InitBuffer(merge_buffer, 4 * kSlots * kFloat);
    x = x_buffer.Get<float>();
    exp = exp_buffer.Get<float>();
    work = work_buffer.Get<float>();
    sums = sums_buffer.Get<float>();
    part = part_buffer.Get<float>();
    merge = merge_buffer.Get<float>();
  }

  __aicore__ inline void run() {
    const Share share(reader.tile.rows);
    for (int64_t row = share.begin; row < share.end; row += kBatch) {
      batch(row, static_cast<int32_t>(smaller(kBatch, share.end - row)));
    }
  }

 private:
  __aicore__ inline void batch(int64_t first, int32_t rows) {
    load(first, rows);
    take_targets(first, rows);
    const int64_t items = reader.chunks() * rows;
    if (items > 0) reader.fetch(first, 0);
    for (int64_t item = 0; item < items; ++item) {
      const int64_t next = item + 1;
      if (next < items) reader.fetch(first + next % rows, next / rows);
      add_row(static_cast<int32_t>(item % rows), reader.columns(item / rows));
      if (next % rows == 0) merge_part(rows * kSlot);
    }
    store(first, rows);
  }

  // The rows' sums so far, each number into a slot of its own, zeros behind it.
  __aicore__ inline void load(int64_t first, int32_t rows) {
    Floats in = loads.AllocTensor<float>();
    for (int32_t kind = 0; kind < kStatsRows; ++kind) {
      AscendC::DataCopyPad(in[kind * kSlots], kept[kind * stride + first],
                           AscendC::DataCopyExtParams{static_cast<uint16_t>(rows), kFloat, 0, 0, 0},
                           AscendC::DataCopyPadExtParams<float>{true, 0, kSlot - 1, 0.0F});
    }
    loads.EnQue(in);
    in = loads.DeQue<float>();
    then();
    for (int32_t kind = 0; kind < kStatsRows; ++kind) {
      AscendC::Muls(sums[kind * kSlots], in[kind * kSlots], 1.0F, rows * kSlot);
    }
    loads.FreeTensor(in);
    AscendC::Duplicate(part, 0.0F, 3 * kSlots);
    then();
  }

  __aicore__ inline void take_targets(int64_t first, int32_t rows) {
    wait_for<AscendC::HardEvent::V_S>();
    for (int32_t row = 0; row < rows; ++row) {
      const int64_t column = column_of(reader.tile, ids.GetValue(first + row));
      if (column >= 0) sums.SetValue(kTarget * kSlots + row * kSlot, reader.at(first + row, column));
    }
    wait_for<AscendC::HardEvent::S_V>();
  }

  // Sums over a chunk of a row, relative to the largest x in it.
  __aicore__ inline void add_row(int32_t row, int32_t count) {
    const int32_t slot = row * kSlot;
    reader.take(x, count);
    AscendC::ReduceMax(part[kLargest * kSlots + slot], x, work, count);
    wait_for<AscendC::HardEvent::V_S>();
    const float largest = part.GetValue(kLargest * kSlots + slot);
    const float base = largest < kSmallest ? 0.0F : largest;  // where all are -inf, anything finite does
    then();
    AscendC::Adds(x, x, -base, count);
    then();
    AscendC::Exp(exp, x, count);
    then();
    AscendC::ReduceSum(part[kSum * kSlots + slot], exp, work, count);
    AscendC::Maxs(x, x, lowest<float>(), count);  // 0 times -inf would be NaN
    then();
    AscendC::Mul(exp, exp, x, count);
    then();
    AscendC::ReduceSum(part[kMoment * kSlots + slot], exp, work, count);
  }

  // As token_logprob.h's merged(), for all rows of the batch.
  __aicore__ inline void merge_part(int32_t count) {
    wait_for<AscendC::HardEvent::S_V>();  // the next chunk writes over maxima that S has read
    then();
    Floats largest = merge, base = merge[kSlots];
    AscendC::Max(largest, sums[kLargest * kSlots], part[kLargest * kSlots], count);
    then();
    AscendC::Maxs(base, largest, kSmallest, count);
    then();
    rebase(sums, base, count);
    rebase(part, base, count);
    AscendC::Muls(sums[kLargest * kSlots], largest, 1.0F, count);
    AscendC::Add(sums[kSum * kSlots], sums[kSum * kSlots], part[kSum * kSlots], count);
    AscendC::Add(sums[kMoment * kSlots], sums[kMoment * kSlots], part[kMoment * kSlots], count);
    then();
  }

  // Sum and moment relative to `base` instead of their own largest.
  __aicore__ inline void rebase(const Floats& of, const Floats& base, int32_t count) {
    Floats shift = merge[2 * kSlots], factor = merge[3 * kSlots];
    Floats sum = of[kSum * kSlots], moment = of[kMoment * kSlots];
    AscendC::Maxs(shift, of[kLargest * kSlots], kSmallest, count);
    then();
    AscendC::Sub(shift, shift, base, count);
    then();
    AscendC::Maxs(shift, shift, lowest<float>(), count);
    then();
    AscendC::Exp(factor, shift, count);
    then();
    AscendC::Mul(shift, shift, sum, count);
    then();
    AscendC::Add(moment, moment, shift, count);
    AscendC::Mul(sum, sum, factor, count);
    then();
    AscendC::Mul(moment, moment, factor, count);
    then();
  }

  __aicore__ inline void store(int64_t first, int32_t rows) {
    Floats out = stores.AllocTensor<float>();
    for (int32_t kind = 0; kind < kStatsRows; ++kind) {
      AscendC::Muls(out[kind * kSlots], sums[kind * kSlots], 1.0F, rows * kSlot);
    }
    stores.EnQue(out);
    out = stores.DeQue<float>();
    for (int32_t kind = 0; kind < kStatsRows; ++kind) {
      AscendC::DataCopyPad(kept[kind * stride + first], out[kind * kSlots],
                           AscendC::DataCopyExtParams{static_cast<uint16_t>(rows), kFloat, 0, 0, 0});
    }
    stores.FreeTensor(out);
  }

  Reader<T> reader;
  const int64_t stride;
  AscendC::GlobalTensor<int64_t> ids;
  AscendC::GlobalTensor<float> kept;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> loads;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> stores;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x_buffer, exp_buffer, work_buffer, sums_buffer, part_buffer, merge_buffer;
  Floats x, exp, work, sums, part, merge;
};

// What the gradient of one row needs.
struct Terms {
  float base, log_sum, entropy, grad_logp, grad_entropy;

  __aicore__ inline bool idle() const { return grad_logp == 0.0F && grad_entropy == 0.0F; }
};

template <class T>
class Gradient {
 public:
  __aicore__ inline Gradient(AscendC::TPipe& pipe, const Tile& tile, GM_ADDR logits, GM_ADDR targets, GM_ADDR terms,
                             int64_t stride, float scale)
      : reader(pipe, tile, logits, scale), stride(stride) {
    ids.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(targets));
    known.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(terms));
    pipe.InitBuffer(stores, 2, kChunk * sizeof(T));
    pipe.InitBuffer(x_buffer, kChunk * kFloat);
    pipe.InitBuffer(p_buffer, kChunk * kFloat);
    x = x_buffer.Get<float>();
    p = p_buffer.Get<float>();
  }

  __aicore__ inline void run() {
    const Share share(reader.tile.rows);
    const int64_t chunks = reader.chunks(), items = (share.end - share.begin) * chunks;
    if (items > 0) reader.fetch(share.begin, 0);
    for (int64_t item = 0; item < items; ++item) {
      const int64_t next = item + 1;
      if (next < items) reader.fetch(share.begin + next / chunks, next % chunks);
      turn(share.begin + item / chunks, item % chunks);
    }
  }

 private:
  __aicore__ inline void turn(int64_t row, int64_t chunk) {
    const int32_t count = reader.columns(chunk);
    const Terms terms{known.GetValue(kBase * stride + row), known.GetValue(kLogSum * stride + row),
                      known.GetValue(kEntropy * stride + row), known.GetValue(kGradLogp * stride + row),
                      known.GetValue(kGradEntropy * stride + row)};
    if (terms.idle()) {
      reader.skip();
      then();
      AscendC::Duplicate(x, 0.0F, count);
    } else {
      reader.take(x, count);
      by_columns(terms, count);
      const int64_t column = column_of(reader.tile, ids.GetValue(row)) - chunk * kChunk;
      if (column >= 0 && column < count) by_target(terms, row, chunk, static_cast<uint32_t>(column));
    }
    store(row, chunk, count);
  }

  // x becomes -scale p (grad_logp + grad_entropy (log p + entropy)), the target's column included.
  __aicore__ inline void by_columns(const Terms& terms, int32_t count) {
    AscendC::Adds(x, x, -terms.base, count);
    then();
    AscendC::Adds(x, x, -terms.log_sum, count);
    then();
    AscendC::Exp(p, x, count);
    then();
    AscendC::Maxs(x, x, lowest<float>(), count);
    then();
    AscendC::Adds(x, x, terms.entropy, count);
    then();
    AscendC::Muls(x, x, -reader.scale * terms.grad_entropy, count);
    then();
    AscendC::Adds(x, x, -reader.scale * terms.grad_logp, count);
    then();
    AscendC::Mul(x, x, p, count);
  }

  __aicore__ inline void by_target(const Terms& terms, int64_t row, int64_t chunk, uint32_t column) {
    wait_for<AscendC::HardEvent::V_S>();
    const float u = reader.at(row, chunk * kChunk + column) - terms.base - terms.log_sum;
    const float of_target = p.GetValue(column), bounded = u < lowest<float>() ? lowest<float>() : u;
    const float pull = terms.grad_logp * less_one(u, of_target);
    x.SetValue(column, -reader.scale * (pull + terms.grad_entropy * of_target * (bounded + terms.entropy)));
    wait_for<AscendC::HardEvent::S_V>();
  }

  // exp(u) - 1: near 0 by its series, for the digits of a target that is nearly certain.
  __aicore__ inline float less_one(float u, float exp_of_u) const {
    if (!(u > -0.35F && u < 0.35F)) return exp_of_u - 1.0F;
    float series = 1.0F;
    for (int32_t n = 9; n > 1; --n) series = 1.0F + u * series / static_cast<float>(n);
    return u * series;
  }

  __aicore__ inline void store(int64_t row, int64_t chunk, int32_t count) {
    AscendC::LocalTensor<T> out = stores.template AllocTensor<T>();
    then();
    narrow(out, count);
    stores.EnQue(out);
    out = stores.template DeQue<T>();
    const auto bytes = static_cast<uint32_t>(count * sizeof(T));
    AscendC::DataCopyPad(reader.from[reader.place(row, chunk * kChunk)], out,
                         AscendC::DataCopyExtParams{1, bytes, 0, 0, 0});
    stores.FreeTensor(out);
  }
  __aicore__ inline void narrow(const AscendC::LocalTensor<float>& out, int32_t count) {
    AscendC::Muls(out, x, 1.0F, count);
  }
  __aicore__ inline void narrow(const AscendC::LocalTensor<bfloat16_t>& out, int32_t count) {
    AscendC::Cast(out, x, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(count));
  }

  Reader<T> reader;
  const int64_t stride;
  AscendC::GlobalTensor<int64_t> ids;
  AscendC::GlobalTensor<float> known;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> stores;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x_buffer, p_buffer;
  Floats x, p;
};

}  // namespace
}  // namespace mdapo::token_logprob

// One kernel for each pass and each type of logits: scalars by value, as a launch passes them.
#define MDAPO_KERNEL(name, Pass, Type)                                                                               \
  extern "C" __global__ __aicore__ void name(GM_ADDR logits, GM_ADDR targets, GM_ADDR values, int64_t rows,          \
                                             int64_t cols, int64_t row_stride, int64_t first_id, int64_t stride,     \
                                             float scale) {                                                          \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                  \
    AscendC::TPipe pipe;                                                                                             \
    mdapo::token_logprob::Pass<Type> pass(pipe, {rows, cols, row_stride, first_id}, logits, targets, values, stride, \
                                          scale);                                                                    \
    pass.run();                                                                                                      \
  }

MDAPO_KERNEL(mdapo_token_logprob_stats_f32, Stats, float)
MDAPO_KERNEL(mdapo_token_logprob_stats_bf16, Stats, bfloat16_t)
MDAPO_KERNEL(mdapo_token_logprob_grad_f32, Gradient, float)
MDAPO_KERNEL(mdapo_token_logprob_grad_bf16, Gradient, bfloat16_t)

namespace mdapo::token_logprob {

#define MDAPO_LAUNCH_TILE(kernel, job, cores, stream)                                                          \
  MDAPO_LAUNCH(kernel, cores, stream, static_cast<GM_ADDR>(job.logits),                                        \
               reinterpret_cast<GM_ADDR>(const_cast<int64_t*>(job.targets)), static_cast<GM_ADDR>(job.values), \
               job.tile.rows, job.tile.cols, job.tile.row_stride, job.tile.first_id, job.value_stride, job.scale)

void launch_stats(const AscendTile& job, uint32_t cores, void* stream) {
  if (job.bfloat16) {
    MDAPO_LAUNCH_TILE(mdapo_token_logprob_stats_bf16, job, cores, stream);
  } else {
    MDAPO_LAUNCH_TILE(mdapo_token_logprob_stats_f32, job, cores, stream);
  }
}

void launch_gradient(const AscendTile& job, uint32_t cores, void* stream) {
  if (job.bfloat16) {
    MDAPO_LAUNCH_TILE(mdapo_token_logprob_grad_bf16, job, cores, stream);
  } else {
    MDAPO_LAUNCH_TILE(mdapo_token_logprob_grad_f32, job, cores, stream);
  }
}

}  // namespace mdapo::token_logprob
