// Random batches through the balancing core under AddressSanitizer and UBSan. Every answer is checked: each item once,
// no micro-batch over its limits, sizes as asked for, no part without need empty, and no part heavier than greedy's.
//   balance_fuzz [cases] [seed]
#include <cstdio>
#include <cstdlib>
#include <random>

#include "balance/balance.h"

using namespace mdapo::balance;

namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t to(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool chance(int percent) { return to(0, 99) < percent; }
  // Small, alike, long-tailed, two-peaked, with zeros, or near the limit of what can be added up.
  std::vector<int64_t> numbers(int64_t n) {
    const int64_t kind = to(0, 6), common = to(0, 500), huge = kMaxTotal / std::max<int64_t>(n, 1);
    std::vector<int64_t> found(static_cast<size_t>(n));
    for (int64_t& value : found) {
      switch (kind) {
        case 0:
          value = to(0, 9);
          break;
        case 1:
          value = common;
          break;
        case 2:
          value = to(1, 1000) * to(1, 1000) / to(1, 1000) + 1;
          break;
        case 3:
          value = chance(20) ? to(900, 1000) : to(1, 60);
          break;
        case 4:
          value = chance(50) ? 0 : to(1, 300);
          break;
        case 5:
          value = to(1, 40) * common;
          break;
        default:
          value = huge - (chance(50) ? 0 : to(0, huge));
          break;
      }
    }
    return found;
  }

 private:
  std::mt19937_64 engine_;
};

[[noreturn]] void fail(const char* what, int64_t number) {
  std::fprintf(stderr, "balance_fuzz: case %lld: %s\n", static_cast<long long>(number), what);
  std::exit(1);
}

void check(bool holds, const char* otherwise, int64_t number) {
  if (!holds) fail(otherwise, number);
}

int64_t items_of(Random& random) {
  const int64_t size = random.to(0, 99);
  return size < 60 ? random.to(0, 24) : size < 98 ? random.to(0, 120) : random.to(0, 900);
}

void one_partition(Random& random, int64_t number) {
  const int64_t n = items_of(random), k = random.chance(90) ? random.to(1, 14) : random.to(1, 300);
  const bool equal = random.chance(50);
  const std::vector<int64_t> cost = random.numbers(n);
  std::vector<int64_t> items(static_cast<size_t>(n), -1), ends(static_cast<size_t>(k)), load(ends), size(ends);
  partition(cost.data(), n, k, equal, items.data(), ends.data());
  std::vector<bool> seen(static_cast<size_t>(n));
  for (int64_t p = 0, at = 0; p < k; ++p) {
    check(ends[p] >= at && ends[p] <= n, "parts that do not follow each other", number);
    size[p] = ends[p] - at;
    for (const int64_t first = at; at < ends[p]; ++at) {
      check(items[at] >= 0 && items[at] < n && !seen[items[at]], "an item twice", number);
      check(at == first || items[at - 1] < items[at], "items of a part in another order", number);
      seen[items[at]] = true;
      load[p] += cost[items[at]];
    }
  }
  check(ends.back() == n, "an item in no part", number);
  const auto [fewest, most] = std::minmax_element(size.begin(), size.end());
  check(n < k || *fewest >= 1, "an empty part", number);
  if (equal) check(*most - *fewest <= 1 && std::is_sorted(size.rbegin(), size.rend()), "sizes differ", number);
  std::vector<int64_t> falling = cost;
  std::sort(falling.rbegin(), falling.rend());
  Groups parts;
  const Sizes sizes = sizes_of(n, k, equal);
  greedy(parts, falling.data(), static_cast<int32_t>(n), static_cast<int32_t>(k), sizes);
  const int64_t heaviest = *std::max_element(load.begin(), load.end());
  check(heaviest <= *std::max_element(parts.load.begin(), parts.load.end()), "heavier than greedy", number);
  check(heaviest >= lower_bound_of(falling.data(), static_cast<int32_t>(n), static_cast<int32_t>(k), sizes),
        "lighter than the lower bound", number);
}

void one_plan(Random& random, int64_t number) {
  const int64_t n = items_of(random), minis = random.to(1, 3);
  const std::vector<int64_t> tokens = random.numbers(n), cost = random.chance(60) ? tokens : random.numbers(n);
  const int64_t longest = n == 0 ? 0 : *std::max_element(tokens.begin(), tokens.end());
  Shape shape{};
  shape.dp = random.chance(90) ? random.to(1, 7) : random.to(1, 60);
  shape.cap = random.chance(30) ? random.to(0, longest)
                                : std::min(kMaxTotal, random.to(0, 5) * (longest / 2) + random.to(0, 20));
  shape.rows = random.chance(60) ? INT64_MAX : random.to(1, 9);
  shape.multiple = random.chance(50) ? 1 : random.to(1, 5);
  shape.at_least = random.chance(50) ? 1 : random.to(1, 6);
  shape.lockstep = random.chance(50);
  shape.equal_size = random.chance(30);
  std::vector<int64_t> mini(static_cast<size_t>(n)), rank(static_cast<size_t>(n), -1), micro(rank),
      count(static_cast<size_t>(minis), -1);
  for (int64_t& m : mini) m = random.to(0, minis - 1);
  plan(tokens.data(), cost.data(), mini.data(), n, minis, shape, rank.data(), micro.data(), count.data());
  for (int64_t m = 0; m < minis; ++m) {
    std::vector<int64_t> filled(static_cast<size_t>(shape.dp * count[m])), rows(filled),
        of_rank(static_cast<size_t>(shape.dp));
    int64_t samples = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (mini[i] != m) continue;
      check(rank[i] >= 0 && rank[i] < shape.dp && micro[i] >= 0 && micro[i] < count[m], "a sample nowhere", number);
      const int64_t at = rank[i] * count[m] + micro[i];
      filled[at] += tokens[i];
      ++rows[at];
      ++of_rank[rank[i]];
      ++samples;
    }
    check(count[m] % shape.multiple == 0 && (count[m] > 0) == (samples > 0), "another number of micro-batches", number);
    for (size_t at = 0; at < filled.size(); ++at) {
      check(filled[at] <= shape.cap || rows[at] == 1, "over the cap", number);
      check(rows[at] <= shape.rows, "too many rows", number);
    }
    if (samples == 0) continue;
    const auto [fewest, most] = std::minmax_element(of_rank.begin(), of_rank.end());
    check(samples < shape.dp || *fewest >= 1, "an idle rank", number);
    check(!shape.equal_size || *most - *fewest <= 1, "unequal ranks", number);
    check(count[m] >= std::min(shape.at_least, samples / shape.dp), "fewer micro-batches than asked for", number);
  }
}

// Numbers that no plan can have are refused.
void one_refusal(Random& random, int64_t number) {
  std::vector<int64_t> tokens = random.numbers(random.to(1, 9)), cost = tokens, mini(tokens.size(), 0);
  const auto n = static_cast<int64_t>(tokens.size());
  Shape shape{2, 100, 8, 1, 1, false, false};
  const int64_t odd[] = {INT64_MIN, -1, kMaxTotal + 1, INT64_MAX};
  const int64_t value = odd[random.to(0, 3)], at = random.to(0, n - 1);
  switch (random.to(0, 5)) {
    case 0:
      tokens[at] = value;
      break;
    case 1:
      cost[at] = value;
      break;
    case 2:
      mini[at] = value;
      break;
    case 3:
      shape.dp = random.chance(50) ? 0 : value;
      break;
    case 4:
      shape.multiple = random.chance(50) ? 0 : value;
      break;
    default:
      shape.rows = random.chance(50) ? 0 : INT64_MIN;
      break;
  }
  std::vector<int64_t> rank(tokens.size()), micro(tokens.size()), count(1);
  try {
    plan(tokens.data(), cost.data(), mini.data(), n, 1, shape, rank.data(), micro.data(), count.data());
  } catch (const std::invalid_argument&) {
    return;
  }
  fail("numbers that make no sense were taken", number);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 100000;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 0);
  for (int64_t number = 0; number < cases; ++number) {
    one_partition(random, number);
    one_plan(random, number);
    if (number % 8 == 0) one_refusal(random, number);
  }
  std::printf("balance_fuzz: %lld random batches, no finding\n", static_cast<long long>(cases));
  return 0;
}
