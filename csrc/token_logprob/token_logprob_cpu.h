// token_logprob on CPU: the two passes over one row of a tile, for every instruction set the compiler offers.
//
// One source, compiled once for each instruction set and chosen at run time (`row_kernels`). All of them use 16 lanes
// in the same order, so that a row's result depends neither on the number of threads nor on the other rows.
#pragma once

#include <cstring>

#include "token_logprob/token_logprob.h"

namespace mdapo::token_logprob {

struct Bf16 {
  uint16_t bits;
};

inline float to_float(float v) { return v; }
inline float to_float(Bf16 v) {
  const uint32_t wide = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}
inline double to_float(double v) { return v; }

template <class T>
using Accumulator = decltype(to_float(T{}));

// The two passes for logits of type T.
template <class T>
struct RowKernels {
  using A = Accumulator<T>;
  Partial<A> (*stats)(const T* logits, int64_t cols, A scale);
  void (*gradient)(T* logits, int64_t cols, A scale, const RowTerms<A>& row, int64_t target);
};

}  // namespace mdapo::token_logprob

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the baseline's registers stay inside inlined functions
#endif

#define MDAPO_ISA baseline
#include "token_logprob/token_logprob_cpu_isa.h"
#undef MDAPO_ISA

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MDAPO_X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define MDAPO_ISA avx2
#include "token_logprob/token_logprob_cpu_isa.h"
#undef MDAPO_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define MDAPO_ISA avx512
#include "token_logprob/token_logprob_cpu_isa.h"
#undef MDAPO_ISA
#pragma GCC pop_options
#endif

namespace mdapo::token_logprob {

enum class Isa { kBaseline, kAvx2, kAvx512 };

inline Isa best_isa() {
#if defined(MDAPO_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

template <class T>
RowKernels<T> row_kernels(Isa isa) {
#if defined(MDAPO_X86)
  if (isa == Isa::kAvx512) return {avx512::stats<T>, avx512::gradient_row<T>};
  if (isa == Isa::kAvx2) return {avx2::stats<T>, avx2::gradient_row<T>};
#endif
  (void)isa;
  return {baseline::stats<T>, baseline::gradient_row<T>};
}

// float64 serves gradient checks: plain loops, same formulas.
template <>
inline RowKernels<double> row_kernels(Isa) {
  return {[](const double* logits, int64_t cols, double scale) {
            double largest = -std::numeric_limits<double>::infinity();
            for (int64_t c = 0; c < cols; ++c) largest = logits[c] > largest ? logits[c] : largest;
            Partial<double> part{largest * scale, 0, 0};
            const double base = base_of(part.largest);
            for (int64_t c = 0; c < cols; ++c) add(part, bounded(logits[c] * scale - base));
            return part;
          },
          [](double* logits, int64_t cols, double scale, const RowTerms<double>& row, int64_t target) {
            for (int64_t c = 0; c < cols; ++c)
              logits[c] = row.idle() ? 0.0 : gradient(row, scale, row.log_p(logits[c] * scale), c == target);
          }};
}

}  // namespace mdapo::token_logprob
