// Random rows through the CPU passes of token_logprob under AddressSanitizer and UBSan, with every instruction set
// that this machine has, against the formulas in long double. Every buffer has exactly its size.
//   token_logprob_fuzz [cases] [seed]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "token_logprob/token_logprob_cpu.h"

namespace {

using namespace mdapo::token_logprob;
using Exact = long double;

struct Random {
  std::mt19937_64 bits;

  int64_t up_to(int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(bits); }
  double normal() { return std::normal_distribution<double>()(bits); }
  bool once_in(int64_t n) { return up_to(n - 1) == 0; }
};

void from_double(double v, float& to) { to = static_cast<float>(v); }
void from_double(double v, double& to) { to = v; }
void from_double(double v, Bf16& to) {
  const float f = static_cast<float>(v);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  to.bits = static_cast<uint16_t>(f != f ? 0x7fc0 : bits >> 16);
}

// What a tile may hold: ordinary numbers, huge ones, and sometimes -inf or NaN, a few or everywhere.
template <class T>
std::vector<T> random_row(Random& random, int64_t cols) {
  const double size = random.once_in(4) ? 1e4 : 4.0;
  const int64_t odd = random.once_in(3) ? 1 + random.up_to(40) : 0;
  const double strange = random.once_in(4) ? std::nan("") : -std::numeric_limits<double>::infinity();
  std::vector<T> row(static_cast<size_t>(cols));
  for (T& z : row) from_double(odd && random.once_in(odd) ? strange : size * random.normal(), z);
  return row;
}

// x itself is rounded to A before the largest is taken off, which shows in exp of the difference.
template <class A>
Exact rounding_of(Exact x) {
  return std::isfinite(x) ? std::fabs(x) * std::numeric_limits<A>::epsilon() : 0;
}

bool near(Exact found, Exact expected, Exact tolerance, Exact scale) {
  if (expected != expected) return found != found;
  return found == expected || std::fabs(found - expected) <= tolerance * (scale + std::fabs(expected));
}

template <class T>
[[noreturn]] void fail(const char* what, Isa isa, const std::vector<T>& row, int64_t column, Exact found,
                       Exact expected) {
  std::printf("%s: %zu columns of %zu bytes, instruction set %d, column %lld: found %.9Lg, expected %.9Lg\n", what,
              row.size(), sizeof(T), static_cast<int>(isa), static_cast<long long>(column), found, expected);
  std::exit(1);
}

template <class A>
struct Tolerances;
template <>
struct Tolerances<float> {
  static constexpr Exact sums = 2e-6L;
  static constexpr Exact gradient = 2e-6L;
};
template <>
struct Tolerances<double> {
  static constexpr Exact sums = 1e-13L;
  static constexpr Exact gradient = 1e-13L;
};

// Sums relative to the largest x that the kernel found, each x rounded as it must round it.
template <class T>
Partial<Exact> expected_stats(const std::vector<T>& row, Accumulator<T> scale, Accumulator<T> largest) {
  Partial<Exact> part{largest, 0, 0};
  for (const T& z : row) {
    const Exact d = Exact(to_float(z)) * scale - base_of(largest);
    const Exact e = std::exp(d);
    part.sum += e;
    part.moment += d == -std::numeric_limits<Exact>::infinity() ? 0 : e * d;
  }
  return part;
}

template <class T>
void check_stats(Isa isa, const std::vector<T>& row, Accumulator<T> scale) {
  using A = Accumulator<T>;
  A largest = -std::numeric_limits<A>::infinity();
  for (const T& z : row) largest = to_float(z) > largest ? to_float(z) : largest;
  const auto found = row_kernels<T>(isa).stats(row.data(), int64_t(row.size()), scale);
  if (found.largest != largest * scale) fail("largest", isa, row, -1, found.largest, largest * scale);
  const auto expected = expected_stats(row, scale, found.largest);
  const Exact tolerance = Tolerances<A>::sums + 4 * rounding_of<A>(found.largest);
  if (!near(found.sum, expected.sum, tolerance, 0)) fail("sum", isa, row, -1, found.sum, expected.sum);
  if (!near(found.moment, expected.moment, tolerance, expected.sum))
    fail("moment", isa, row, -1, found.moment, expected.moment);
}

template <class T>
void check_gradient(Isa isa, const std::vector<T>& row, Accumulator<T> scale, int64_t target, Random& random) {
  using A = Accumulator<T>;
  const auto part = row_kernels<T>(Isa::kBaseline).stats(row.data(), int64_t(row.size()), scale);
  const A log_sum = std::log(part.sum);
  RowTerms<A> terms{part.largest, log_sum, log_sum - part.moment / part.sum, A(random.normal()), A(random.normal())};
  if (random.once_in(4)) terms.grad_logp = 0;
  if (random.once_in(4)) terms.grad_entropy = 0;
  std::vector<T> found = row;
  row_kernels<T>(isa).gradient(found.data(), int64_t(row.size()), scale, terms, target);
  for (size_t c = 0; c < row.size(); ++c) {
    const Exact x = Exact(to_float(row[c])) * scale, u = x - terms.base - terms.log_sum, p = std::exp(u);
    const Exact p_log_p = p == 0 ? 0 : p * (u + terms.entropy);
    Exact expected = -scale * (terms.grad_logp * (p - (int64_t(c) == target)) + terms.grad_entropy * p_log_p);
    if (terms.idle()) expected = 0;
    const Exact tolerance = (sizeof(T) == 2 ? 0.004L : 0) + Tolerances<A>::gradient + 4 * rounding_of<A>(x);
    const Exact entropy_part = std::fabs(terms.grad_entropy) * (1 + std::fabs(terms.entropy));
    const Exact size = scale * (std::fabs(terms.grad_logp) + entropy_part);
    if (!near(to_float(found[c]), expected, tolerance, size))
      fail("gradient", isa, row, int64_t(c), to_float(found[c]), expected);
  }
}

// A row in two parts, merged, is the row.
template <class T>
void check_merging(Isa isa, const std::vector<T>& row, Accumulator<T> scale, Random& random) {
  using A = Accumulator<T>;
  const auto kernels = row_kernels<T>(isa);
  const int64_t cols = int64_t(row.size()), cut = random.up_to(cols);
  const auto whole = kernels.stats(row.data(), cols, scale);
  const std::vector<T> left(row.begin(), row.begin() + cut), right(row.begin() + cut, row.end());
  const auto both = merged(merged(empty_partial<A>(), kernels.stats(left.data(), cut, scale)),
                           kernels.stats(right.data(), cols - cut, scale));
  const Exact tolerance = 2 * Tolerances<A>::sums + 8 * rounding_of<A>(whole.largest);
  if (both.largest != whole.largest) fail("merged largest", isa, row, cut, both.largest, whole.largest);
  if (!near(both.sum, whole.sum, tolerance, 0)) fail("merged sum", isa, row, cut, both.sum, whole.sum);
  if (!near(both.moment, whole.moment, tolerance, whole.sum))
    fail("merged moment", isa, row, cut, both.moment, whole.moment);
}

template <class T>
void check_row(Random& random) {
  const int64_t cols = random.once_in(8) ? random.up_to(1500) : random.up_to(100);
  const auto row = random_row<T>(random, cols);
  const double temperatures[] = {1.0, 0.6, 1.7, 0.01};
  const auto scale = Accumulator<T>(1 / temperatures[random.up_to(3)]);
  const int64_t target = cols > 0 && random.once_in(2) ? random.up_to(cols - 1) : -1;
  for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
    check_stats(Isa(isa), row, scale);
    check_merging(Isa(isa), row, scale, random);
    check_gradient(Isa(isa), row, scale, target, random);
  }
}

// Ids and offsets at the ends of their range.
void check_index_maths(Random& random) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const int64_t ids[] = {-kMost - 1, -1, 0, 1, int64_t(1) << 31, kMost - 1, kMost, random.up_to(kMost)};
  const int64_t first = ids[2 + random.up_to(5)], cols = random.up_to(1000);
  const Tile tile{1 << 20, cols, (int64_t(1) << 32) + cols, first};
  for (const int64_t id : ids) {
    const bool inside = id >= first && uint64_t(id) - uint64_t(first) < uint64_t(cols);
    const int64_t column = column_of(tile, id);
    if (inside ? column != id - first : column != -1) {
      std::printf("column_of(%lld) from %lld: %lld\n", (long long)id, (long long)first, (long long)column);
      std::exit(1);
    }
  }
  if (row_offset(tile, tile.rows - 1) != (tile.rows - 1) * tile.row_stride) std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t shapes = argc > 1 ? std::atoll(argv[1]) : 100000;
  Random random{std::mt19937_64(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1)};
  for (int64_t i = 0; i < shapes; ++i) {
    switch (random.up_to(2)) {
      case 0:
        check_row<float>(random);
        break;
      case 1:
        check_row<Bf16>(random);
        break;
      default:
        check_row<double>(random);
    }
    check_index_maths(random);
  }
  std::printf("token_logprob: %lld shapes, instruction sets 0 to %d, no finding\n", static_cast<long long>(shapes),
              static_cast<int>(best_isa()));
}
