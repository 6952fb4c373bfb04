// Random layouts through pack's CPU kernels under AddressSanitizer and UBSan: every buffer has exactly its size, every
// result is compared with a loop over tokens, and runs that lie outside must be refused before anything is touched.
//   pack_fuzz [cases] [seed]
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "pack/pack_cpu.h"

using namespace mdapo::pack;

namespace {

using Bytes = std::unique_ptr<uint8_t[]>;  // exactly as long as asked for: one byte more is a finding

struct Layout {
  std::vector<int64_t> columns;  // [4, N]
  int64_t count = 0, rows = 0, total = 0;
  Shard shard;

  Runs runs() const {
    const int64_t* data = columns.data();
    return {data, data + count, data + 2 * count, data + 3 * count, count};
  }
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t to(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool chance(int percent) { return to(0, 99) < percent; }
  Bytes bytes(int64_t size) {
    Bytes found(new uint8_t[static_cast<size_t>(size)]);
    for (int64_t i = 0; i < size; ++i) found[i] = static_cast<uint8_t>(engine_() | 1);  // never 0: padding is
    return found;
  }

 private:
  std::mt19937_64 engine_;
};

[[noreturn]] void fail(const char* what, int64_t number) {
  std::fprintf(stderr, "pack_fuzz: case %lld: %s\n", static_cast<long long>(number), what);
  std::exit(1);
}

// Rows with gaps between them, in any order, in segments with gaps between them.
Layout random_layout(Random& random) {
  Layout layout;
  layout.count = random.to(0, 9);
  layout.shard.cp = random.chance(50) ? 1 : random.to(1, 5);
  layout.shard.rank = random.to(0, layout.shard.cp - 1);
  const int64_t chunks = layout.shard.cp > 1 ? 2 * layout.shard.cp : 1, n = layout.count;
  layout.columns.resize(static_cast<size_t>(4 * n));
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[i], order[random.to(0, i)]);
  for (int64_t i = 0; i < n; ++i) {  // rows in order of i
    const int64_t length = random.chance(15) ? 0 : random.to(0, random.chance(10) ? 400 : 60);
    layout.rows += random.chance(50) ? 0 : random.to(0, 20);
    layout.columns[i] = layout.rows;
    layout.columns[n + i] = length;
    layout.rows += length;
  }
  for (const int64_t i : order) {  // segments in another
    layout.total += random.chance(70) ? 0 : random.to(0, 5) * chunks;
    const int64_t least = (layout.columns[n + i] + chunks - 1) / chunks * chunks;
    layout.columns[2 * n + i] = layout.total;
    layout.columns[3 * n + i] = least + random.to(0, 3) * chunks;
    layout.total += layout.columns[3 * n + i];
  }
  layout.rows += random.to(0, 20);
  layout.total += random.to(0, 3) * chunks;
  return layout;
}

// Row token -> packed token of this shard, -1 where the shard has it not.
std::vector<int64_t> by_loop(const Layout& layout) {
  std::vector<int64_t> packed_of(static_cast<size_t>(layout.rows), -1);
  const Runs runs = layout.runs();
  const int64_t cp = layout.shard.cp;
  for (int64_t i = 0; i < runs.count; ++i) {
    for (int64_t position = 0; position < runs.length[i]; ++position) {
      int64_t at = runs.begin[i] + position;
      if (cp > 1) {
        const int64_t size = runs.span[i] / (2 * cp), chunk = position / size;
        if (chunk != layout.shard.rank && chunk != 2 * cp - 1 - layout.shard.rank) continue;
        at = runs.begin[i] / cp + position % size + (chunk == layout.shard.rank ? 0 : size);
      }
      packed_of[runs.row_start[i] + position] = at;
    }
  }
  return packed_of;
}

// All tokens in a few cuts, as threads have it.
void copy_in_cuts(Random& random, const std::vector<Field>& fields, const std::vector<Piece>& pieces, int64_t tokens) {
  for (int64_t at = 0; at < tokens;) {
    const int64_t end = random.chance(50) ? tokens : random.to(at + 1, tokens);
    copy_range(fields, pieces, at, end, random.chance(50));
    at = end;
  }
}

void one_layout(Random& random, int64_t number) {
  const Layout layout = random_layout(random);
  const int64_t local = layout.total / layout.shard.cp, num_fields = random.to(1, 3);
  const auto there = to_packed(layout.runs(), layout.shard, layout.rows, layout.total);
  const auto back = to_rows(layout.runs(), layout.shard, layout.rows, layout.total);
  const auto packed_of = by_loop(layout);
  std::vector<Bytes> rows, packed, again;
  std::vector<Field> pack, unpack;
  std::vector<int64_t> items;
  for (int64_t f = 0; f < num_fields; ++f) {
    const int64_t item = random.chance(80) ? int64_t{1} << random.to(0, 4) : random.to(1, 70);
    items.push_back(item);
    rows.push_back(random.bytes(layout.rows * item));
    packed.push_back(random.bytes(local * item));
    again.push_back(random.bytes(layout.rows * item));
    pack.push_back({rows.back().get(), packed.back().get(), item});
    unpack.push_back({packed.back().get(), again.back().get(), item});
  }
  copy_in_cuts(random, pack, there, local);
  copy_in_cuts(random, unpack, back, layout.rows);
  for (int64_t f = 0; f < num_fields; ++f) {
    const int64_t item = items[f];
    std::vector<uint8_t> expected(static_cast<size_t>(local * item), 0),
        returned(static_cast<size_t>(layout.rows * item), 0);
    for (int64_t row = 0; row < layout.rows; ++row) {
      if (packed_of[row] < 0) continue;
      std::copy_n(rows[f].get() + row * item, item, expected.begin() + packed_of[row] * item);
      std::copy_n(rows[f].get() + row * item, item, returned.begin() + row * item);
    }
    if (!std::equal(expected.begin(), expected.end(), packed[f].get()))
      fail("packed otherwise than by the loop", number);
    if (!std::equal(returned.begin(), returned.end(), again[f].get()))
      fail("unpacked otherwise than by the loop", number);
  }
}

// A number of the layout is replaced by an odd one: refused, or a layout that can be copied.
void one_bad_layout(Random& random) {
  Layout layout = random_layout(random);
  const int64_t odd[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 1, int64_t{1} << 40, layout.rows + 1, layout.total + 1};
  const int64_t value = odd[random.to(0, 6)];
  const int64_t which = random.to(0, 4);
  if (which == 0 || layout.columns.empty()) {
    layout.shard = random.chance(50) ? Shard{value, 0} : Shard{layout.shard.cp, value};
  } else {
    int64_t& column =
        layout.columns[static_cast<size_t>(random.to(0, static_cast<int64_t>(layout.columns.size()) - 1))];
    column = random.chance(50) ? value : column + (random.chance(50) ? 1 : -1);
  }
  try {
    const auto pieces = to_packed(layout.runs(), layout.shard, layout.rows, layout.total);
    const int64_t local = layout.total / layout.shard.cp;
    const Bytes rows = random.bytes(layout.rows), packed = random.bytes(local);
    copy_range({{rows.get(), packed.get(), 1}}, pieces, 0, local, false);
  } catch (const std::invalid_argument&) {
  }
  try {
    const auto pieces = to_rows(layout.runs(), layout.shard, layout.rows, layout.total);
    const Bytes rows = random.bytes(layout.rows), packed = random.bytes(layout.total / layout.shard.cp);
    copy_range({{packed.get(), rows.get(), 1}}, pieces, 0, layout.rows, true);
  } catch (const std::invalid_argument&) {
  }
}

// Beyond 2^31 tokens, where only the maths is checked: pieces are ascending, disjoint, and as long as the runs.
void one_huge_layout(Random& random, int64_t number) {
  Layout layout = random_layout(random);
  const int64_t factor = int64_t{1} << random.to(20, 50);
  for (int64_t& value : layout.columns) value *= factor;
  layout.rows *= factor;
  layout.total *= factor;
  int64_t tokens = 0, expected = 0, end = 0;
  for (layout.shard.rank = 0; layout.shard.rank < layout.shard.cp; ++layout.shard.rank) {
    end = 0;
    for (const Piece& piece : to_packed(layout.runs(), layout.shard, layout.rows, layout.total)) {
      if (piece.count <= 0 || piece.to < end || piece.to + piece.count > layout.total / layout.shard.cp ||
          piece.from < 0 || piece.from + piece.count > layout.rows) {
        fail("a piece lies outside", number);
      }
      end = piece.to + piece.count;
      tokens += piece.count;
    }
  }
  for (int64_t i = 0; i < layout.count; ++i) expected += layout.columns[layout.count + i];
  if (tokens != expected) fail("the shards together have not all tokens", number);
}

void one_mask(Random& random, int64_t number) {
  const int64_t size = random.to(0, 90);
  Bytes row(new uint8_t[static_cast<size_t>(size)]);
  const int64_t from = random.to(0, size), to = random.to(from, size), flips = random.chance(30) ? random.to(0, 2) : 0;
  for (int64_t i = 0; i < size; ++i) row[i] = i >= from && i < to ? 1 : 0;
  for (int64_t i = 0; i < flips && size > 0; ++i) row[random.to(0, size - 1)] ^= 1;
  int64_t first = -1, end = -1, ones = 0, expected_first = 0, expected_end = 0;
  const bool gap = mask_span(row.get(), size, &first, &end);
  for (int64_t i = 0; i < size; ++i) {
    if (row[i] == 0) continue;
    if (ones++ == 0) expected_first = i;
    expected_end = i + 1;
  }
  if (first != expected_first || end != expected_end || gap != (ones != end - first)) fail("another span", number);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 100000;
  Random random(argc > 2 ? static_cast<uint64_t>(std::atoll(argv[2])) : 0);
  for (int64_t number = 0; number < cases; ++number) {
    one_layout(random, number);
    one_mask(random, number);
    if (number % 4 == 0) one_bad_layout(random);
    if (number % 4 == 1) one_huge_layout(random, number);
  }
  std::printf("pack_fuzz: %lld random layouts, no finding\n", static_cast<long long>(cases));
  return 0;
}
