// No include guard: token_logprob_cpu.h includes this once for each instruction set, as namespace MDAPO_ISA.
// Vectors are the compiler's own (GCC, clang): 16 lanes are one register of AVX-512, two of AVX2, four of SSE or NEON.

namespace mdapo::token_logprob::MDAPO_ISA {

using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));
using H = uint16_t __attribute__((vector_size(32)));
constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

static inline __attribute__((always_inline)) F fill(float v) { return F{} + v; }

static inline __attribute__((always_inline)) F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline __attribute__((always_inline)) F load(const Bf16* p) {
  H half;
  std::memcpy(&half, p, sizeof half);
  return (F)(__builtin_convertvector(half, I) << 16);
}

static inline __attribute__((always_inline)) void store(float* p, const F& v) { std::memcpy(p, &v, sizeof v); }

// To nearest, ties to even; NaN stays NaN.
static inline __attribute__((always_inline)) void store(Bf16* p, const F& v) {
  const I bits = (I)v;
  const I rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
  const H half = __builtin_convertvector(v == v ? rounded : (I{} + 0x7fc0), H);
  std::memcpy(p, &half, sizeof half);
}

// The last columns of a row, fewer than 16, with `rest` in the other lanes.
template <class T>
static inline __attribute__((always_inline)) F load_some(const T* p, int64_t n, float rest) {
  T lanes[kLanes];
  store(lanes, fill(rest));
  std::memcpy(lanes, p, size_t(n) * sizeof(T));
  return load(lanes);
}

template <class T>
static inline __attribute__((always_inline)) void store_some(T* p, int64_t n, const F& v) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, size_t(n) * sizeof(T));
}

static inline __attribute__((always_inline)) F bounded16(const F& d) {
  const F low = fill(lowest<float>());
  return d < low ? low : d;
}

// exp(d) for d in [lowest, 88], 0 at lowest; relative error below 1e-7. d = n ln 2 + r with |r| <= ln(2) / 2, and
// exp(r) = 1 + r + r^2 q(r), q of degree 4 by a minimax fit of the relative error (3e-9, before rounding).
static inline __attribute__((always_inline)) F exp16(const F& d) {
  const F shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is left in the low bits
  const F t = d * 1.44269504f + shift;
  const F n = t - shift;
  const F r = (d - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts, the first with 9 trailing zeros
  F q = r * 0.00138145406f + 0.00836874545f;
  q = q * r + 0.041668389f;
  q = q * r + 0.166665211f;
  q = q * r + 0.49999994f;
  const F e = q * (r * r) + r + 1.0f;
  const F scaled = (F)((I)e + ((I)t << 23));
  return d <= fill(lowest<float>()) ? F{} : scaled;
}

static inline __attribute__((always_inline)) float sum_lanes(const F& lanes) {
  F v = lanes;
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

template <class T>
static float largest_of(const T* logits, int64_t cols) {
  F a = fill(-kInfinity), b = a;
  int64_t c = 0;
  for (; c + 2 * kLanes <= cols; c += 2 * kLanes) {
    const F v = load(logits + c), w = load(logits + c + kLanes);
    a = v > a ? v : a;
    b = w > b ? w : b;
  }
  for (; c < cols; c += kLanes) {
    const F v = cols - c < kLanes ? load_some(logits + c, cols - c, -kInfinity) : load(logits + c);
    a = v > a ? v : a;
  }
  a = b > a ? b : a;
  float largest = a[0];
  for (int64_t i = 1; i < kLanes; ++i) largest = a[i] > largest ? a[i] : largest;
  return largest;
}

// Two passes over the row, the second of which finds it in the first-level cache.
template <class T>
static Partial<float> stats(const T* logits, int64_t cols, float scale) {
  const float largest = largest_of(logits, cols) * scale;
  const F base = fill(base_of(largest));
  F sum_a{}, sum_b{}, moment_a{}, moment_b{};
  int64_t c = 0;
  for (; c + 2 * kLanes <= cols; c += 2 * kLanes) {
    const F v = bounded16(load(logits + c) * scale - base), w = bounded16(load(logits + c + kLanes) * scale - base);
    const F e = exp16(v), f = exp16(w);
    sum_a += e;
    sum_b += f;
    moment_a += e * v;
    moment_b += f * w;
  }
  for (; c < cols; c += kLanes) {
    const F z = cols - c < kLanes ? load_some(logits + c, cols - c, -kInfinity) : load(logits + c);
    const F v = bounded16(z * scale - base), e = exp16(v);
    sum_a += e;
    moment_a += e * v;
  }
  // exp16 makes a number of a NaN, which the moment, multiplied by it, keeps: a row with one is to be noticed.
  const float moment = sum_lanes(moment_a + moment_b);
  return {largest, moment == moment ? sum_lanes(sum_a + sum_b) : moment, moment};
}

static inline __attribute__((always_inline)) F gradient16(const F& z, float scale, const RowTerms<float>& row) {
  const F u = bounded16(z * scale - row.base - row.log_sum);
  // The upper bound only matters for a row whose terms are not its own.
  const F p = exp16(u > 88.0f ? fill(88.0f) : u);
  return p * ((u + row.entropy) * (-scale * row.grad_entropy) - scale * row.grad_logp);
}

template <class T>
static void gradient_row(T* logits, int64_t cols, float scale, const RowTerms<float>& row, int64_t target) {
  if (cols == 0) return;
  if (row.idle()) {
    std::memset(logits, 0, size_t(cols) * sizeof(T));
    return;
  }
  F at_target{};
  if (target >= 0) at_target[0] = gradient(row, scale, row.log_p(to_float(logits[target]) * scale), true);
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) store(logits + c, gradient16(load(logits + c), scale, row));
  if (c < cols) store_some(logits + c, cols - c, gradient16(load_some(logits + c, cols - c, 0.0f), scale, row));
  if (target >= 0) store_some(logits + target, 1, at_target);
}

}  // namespace mdapo::token_logprob::MDAPO_ISA
