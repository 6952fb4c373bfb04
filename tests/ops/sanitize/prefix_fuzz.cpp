// Random rows through the sizes of prefix trees under AddressSanitizer and UBSan. Every answer is checked against a
// trie that is built token by token (least = 1), and for wider nodes to lie between that and no sharing at all.
//   prefix_fuzz [cases] [seed]
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "prefix/prefix.h"

using namespace mdapo::prefix;

namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t to(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool chance(int percent) { return to(0, 99) < percent; }

 private:
  std::mt19937_64 engine_;
};

void check(bool holds, const char* otherwise, int64_t number) {
  if (holds) return;
  std::fprintf(stderr, "prefix_fuzz: case %lld: %s\n", static_cast<long long>(number), otherwise);
  std::exit(1);
}

struct Rows {
  std::vector<int32_t> ids;
  std::vector<int64_t> starts, lengths, ends;

  Batch batch() const {
    return {ids.data(),
            static_cast<int64_t>(ids.size()),
            starts.data(),
            lengths.data(),
            static_cast<int64_t>(starts.size()),
            ends.data(),
            static_cast<int64_t>(ends.size())};
  }
};

// Rows that are cut from one another, so that they agree for a while.
Rows random_rows(Random& random) {
  Rows rows;
  const int64_t count = random.to(0, 14), longest = random.chance(20) ? 200 : 24;
  const auto alphabet = static_cast<int32_t>(random.to(1, 3));
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int32_t> row;
    if (i > 0 && random.chance(75)) {
      const int64_t other = random.to(0, i - 1), kept = random.to(0, rows.lengths[other]);
      row.assign(rows.ids.begin() + rows.starts[other], rows.ids.begin() + rows.starts[other] + kept);
    }
    for (int64_t more = random.to(row.empty() ? 1 : 0, longest); more > 0; --more) {
      row.push_back(static_cast<int32_t>(random.to(0, alphabet)) - (alphabet == 3 ? 2 : 0));
    }
    rows.starts.push_back(static_cast<int64_t>(rows.ids.size()));
    rows.lengths.push_back(static_cast<int64_t>(row.size()));
    rows.ids.insert(rows.ids.end(), row.begin(), row.end());
    if (random.chance(15)) rows.ends.push_back(i + 1);
    if (random.chance(5)) rows.ends.push_back(i + 1);
  }
  if (rows.ends.empty() || rows.ends.back() != count) rows.ends.push_back(count);
  return rows;
}

// All beginnings of rows without their last token, each once; and the last tokens.
Size trie_size(const Rows& rows, int64_t first, int64_t last) {
  std::set<std::vector<int32_t>> seen;
  Size size;
  for (int64_t i = first; i < last; ++i) {
    std::vector<int32_t> begun;
    for (int64_t at = 0; at < rows.lengths[i]; ++at) {
      begun.push_back(rows.ids[rows.starts[i] + at]);
      if (at + 1 < rows.lengths[i] && !seen.insert(begun).second) continue;
      ++size.tokens;
      size.squares += 2 * at + 1;
    }
  }
  return size;
}

void one_batch(Random& random, int64_t number) {
  const Rows rows = random_rows(random);
  const Batch batch = rows.batch();
  const int64_t least = random.to(1, 12);
  std::vector<int64_t> order(static_cast<size_t>(batch.rows));
  require_valid(batch, least);
  for (int64_t b = 0; b < batch.bundles; ++b) {
    const int64_t first = b == 0 ? 0 : batch.ends[b - 1], last = batch.ends[b];
    const Size trie = trie_size(rows, first, last), all = measure(batch, b, 1, order.data());
    check(all.tokens == trie.tokens && all.squares == trie.squares, "another size than the trie's", number);
    const Size some = measure(batch, b, least, order.data());
    int64_t tokens = 0;
    std::set<int64_t> seen;
    for (int64_t i = first; i < last; ++i) {
      tokens += batch.lengths[i];
      check(order[i] >= first && order[i] < last && seen.insert(order[i]).second, "a row twice", number);
      check(i == first || before(batch, order[i - 1], order[i]), "rows out of order", number);
    }
    check(some.tokens >= trie.tokens && some.tokens <= tokens && some.squares >= trie.squares, "not between the bounds",
          number);
  }
}

void one_refusal(Random& random, int64_t number) {
  Rows rows = random_rows(random);
  const int64_t odd[] = {INT64_MIN, -1, static_cast<int64_t>(rows.ids.size()) + 1, INT64_MAX};
  const int64_t value = odd[random.to(0, 3)], kind = rows.starts.empty() ? 3 : random.to(0, 3);
  if (kind == 0) rows.starts[random.to(0, static_cast<int64_t>(rows.starts.size()) - 1)] = value;
  if (kind == 1) rows.lengths[random.to(0, static_cast<int64_t>(rows.lengths.size()) - 1)] = value;
  if (kind == 2) rows.ends.back() += random.chance(50) ? 1 : -1;
  try {
    require_valid(rows.batch(), kind == 3 ? random.to(-2, 0) : 1);
  } catch (const std::invalid_argument&) {
    return;
  }
  check(false, "rows that are not there were taken", number);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 100000;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 0);
  for (int64_t number = 0; number < cases; ++number) {
    one_batch(random, number);
    if (number % 8 == 0) one_refusal(random, number);
  }
  std::printf("prefix_fuzz: %lld random batches, no finding\n", static_cast<long long>(cases));
  return 0;
}
