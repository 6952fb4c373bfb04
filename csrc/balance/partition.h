// Items into k parts of nearly equal cost: greedy, then levelled, then searched where parts are small.
#pragma once

#include <array>
#include <tuple>

#include "balance/level.h"

namespace mdapo::balance {

constexpr int kLevelPrecision = 20;      // levelled to 2^-20 of the bound,
constexpr int kSearchPrecision = 12;     // searched to 2^-12
constexpr int32_t kWhole = 16;           // items of a problem that is searched as a whole
constexpr int32_t kSearched = 24;        // items of two or three parts that are searched together
constexpr int32_t kSearchPartners = 32;  // the lightest parts that the heaviest one is searched with
constexpr int64_t kNodes = 1 << 13;      // placements that all searches of a partition may try
constexpr int64_t kNodesEach = 1 << 11;  // and one of them, unless it is of the whole

// How many items a part may have: any number, or `base`, or base + 1 in `extra` parts.
struct Sizes {
  bool equal;
  int64_t base, extra;

  bool full(int64_t size, int64_t extra_left) const {
    return equal && (size > base || (size == base && extra_left == 0));
  }
};

inline Sizes sizes_of(int64_t items, int64_t parts, bool equal) { return {equal, items / parts, items % parts}; }

// Parts by load, then by size, so that items without cost spread out too: a heap whose top is changed in place.
class Lightest {
 public:
  explicit Lightest(int32_t parts) : heap_(parts) {
    for (int32_t part = 0; part < parts; ++part) heap_[part] = {0, part};
  }
  int32_t part() const { return static_cast<int32_t>(heap_[0].tag & 0xffffffff); }
  int64_t size() const { return heap_[0].tag >> 32; }
  void add(int64_t cost) { sift_down({heap_[0].load + cost, heap_[0].tag + (int64_t{1} << 32)}); }
  void close() {
    const Entry last = heap_.back();
    heap_.pop_back();
    if (!heap_.empty()) sift_down(last);
  }

 private:
  struct Entry {
    int64_t load, tag;  // tag: the size, then the part
    bool operator<(const Entry& other) const { return load != other.load ? load < other.load : tag < other.tag; }
  };
  void sift_down(Entry entry) {
    size_t at = 0;
    for (size_t child = 1; child < heap_.size(); child = 2 * at + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (entry < heap_[child]) break;
      heap_[at] = heap_[child];
      at = child;
    }
    heap_[at] = entry;
  }

  std::vector<Entry> heap_;
};

// Longest processing time first (Graham 1969): each item, costliest first, to the lightest part that is not full.
inline void greedy(Groups& parts, const int64_t* cost, int32_t n, int32_t k, Sizes sizes) {
  parts.open(k);
  for (Members& members : parts.members) members.reserve(n / k + 4);
  Lightest lightest(k);
  for (int32_t item = 0; item < n; ++item) {
    while (sizes.full(lightest.size(), sizes.extra)) lightest.close();
    parts.put(lightest.part(), item, cost);
    sizes.extra -= sizes.equal && lightest.size() == sizes.base;
    lightest.add(cost[item]);
  }
}

// No partition is better than the largest of
//   the mean;
//   of the j k + 1 costliest items, j + 1 share a part: the cheapest j + 1 of them (pigeonholes), for every j;
// and, where parts have at least `base` items,
//   the g costliest are in g parts, filled up with the cheapest items, or two of them share one, for every g.
inline int64_t lower_bound_of(const int64_t* cost, int32_t n, int32_t k, Sizes sizes) {
  if (n == 0) return 0;
  std::vector<int64_t> sum(n + 1);
  for (int32_t i = 0; i < n; ++i) sum[i + 1] = sum[i] + cost[i];
  const auto filled = [&](int64_t held, int64_t parts) {  // the cheapest items that these parts need besides
    const int64_t missing = sizes.equal ? std::max<int64_t>(sizes.base - held, 0) * parts : 0;
    return sum[n] - sum[n - missing];
  };
  int64_t bound = sum[n] / k + (sum[n] % k != 0);
  for (int64_t j = 0; j * k < n; ++j) bound = std::max(bound, sum[j * k + 1] - sum[j * k - j] + filled(j + 1, 1));
  for (int32_t g = 2; sizes.equal && g <= std::min(k, n); ++g) {
    const int64_t all = sum[g] + filled(1, g);
    bound = std::max(bound, std::min(all / g + (all % g != 0), sum[g] - sum[g - 2] + filled(2, 1)));
  }
  return bound;
}

// The best parts for a few items, by depth-first search in the order of the greedy algorithm, which is its first leaf
// (complete greedy algorithm: Korf 1998). Exact unless `nodes`, which it uses up, run out. At most kWhole parts.
struct Search {
  const Members& items;
  const int64_t* cost;
  Sizes sizes;
  int64_t enough;  // end at a largest load of this
  int64_t& nodes;
  int64_t best;  // only better ones are wanted
  std::vector<int64_t> load;
  std::vector<int64_t> size;
  std::vector<int32_t> part, found;

  Search(const Members& items, const int64_t* cost, int32_t k, Sizes sizes, int64_t enough, int64_t best,
         int64_t& nodes)
      : items(items),
        cost(cost),
        sizes(sizes),
        enough(enough),
        nodes(nodes),
        best(best),
        load(k),
        size(k),
        part(items.size()) {}

  void place(size_t depth, int64_t heaviest) {
    if (depth == items.size()) {
      best = heaviest;
      found = part;
      return;
    }
    std::array<std::tuple<int64_t, int64_t, int32_t>, kWhole> order;  // load, size, part
    size_t open = 0;
    for (int32_t p = 0; p < static_cast<int32_t>(load.size()); ++p) {
      if (!sizes.full(size[p], sizes.extra)) order[open++] = {load[p], size[p], p};
    }
    std::sort(order.begin(), order.begin() + open);
    const int64_t own = cost[items[depth]];
    for (size_t o = 0; o < open; ++o) {
      const auto [before, count, p] = order[o];
      const bool alike = o > 0 && before == std::get<0>(order[o - 1]) && count == std::get<1>(order[o - 1]);
      if (alike) continue;
      if (before + own >= best || best <= enough || nodes == 0) return;
      --nodes;
      const bool extra = sizes.equal && count == sizes.base;
      load[p] += own, ++size[p], sizes.extra -= extra, part[depth] = p;
      place(depth + 1, std::max(heaviest, before + own));
      load[p] -= own, --size[p], sizes.extra += extra;
    }
  }
};

// Everything may go everywhere; parts keep their sizes, or none becomes empty.
struct PartRules {
  const Groups& parts;
  bool equal;

  bool may_move(int32_t a, int32_t b) const {
    const size_t from = parts.members[a].size();
    return equal ? from == parts.members[b].size() + 1 : from > 1;
  }
  bool fits(int32_t, int32_t, int32_t, int32_t) const { return true; }
  void moved(int32_t, int32_t, int32_t, int32_t) const {}
};

// Share out anew the items of these parts, in at most `most` of the `nodes` left; false when that makes the heaviest of
// them no lighter.
inline bool resplit(Groups& parts, const Members& which, const int64_t* cost, bool equal, int64_t enough, int64_t most,
                    int64_t& nodes) {
  const auto k = static_cast<int64_t>(which.size());
  int64_t count = 0, heaviest = 0;
  for (const int32_t p : which) {
    count += static_cast<int64_t>(parts.members[p].size());
    heaviest = std::max(heaviest, parts.load[p]);
  }
  if (count > kSearched) return false;
  Members pool;
  for (const int32_t p : which) pool.insert(pool.end(), parts.members[p].begin(), parts.members[p].end());
  std::sort(pool.begin(), pool.end());
  int64_t own = std::min(nodes, most);
  nodes -= own;
  Search search(pool, cost, k, sizes_of(count, k, equal), enough, heaviest, own);
  search.place(0, 0);
  nodes += own;
  if (search.found.empty()) return false;
  for (const int32_t p : which) parts.members[p].clear(), parts.load[p] = 0;
  for (size_t i = 0; i < pool.size(); ++i) parts.put(which[search.found[i]], pool[i], cost);
  return true;
}

// The heaviest part with one of the lightest, then with two; false when none of that helps.
inline bool resplit_heaviest(Groups& parts, const int64_t* cost, bool equal, int64_t enough, int64_t& nodes) {
  Members order = numbers_to(parts.count());
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return parts.load[a] < parts.load[b]; });
  const int32_t a = order.back(), others = std::min(parts.count() - 1, kSearchPartners);
  for (int32_t b = 0; b < others && nodes > 0; ++b) {
    if (resplit(parts, {a, order[b]}, cost, equal, enough, kNodesEach, nodes)) return true;
  }
  for (int32_t c = 1; c < others; ++c) {
    for (int32_t b = 0; b < c && nodes > 0; ++b) {
      if (resplit(parts, {a, order[b], order[c]}, cost, equal, enough, kNodesEach, nodes)) return true;
    }
  }
  return false;
}

inline Groups largest_first(Groups parts) {
  Members order = numbers_to(parts.count());
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return parts.members[a].size() > parts.members[b].size(); });
  Groups ordered;
  for (const int32_t p : order) {
    ordered.members.push_back(std::move(parts.members[p]));
    ordered.load.push_back(parts.load[p]);
  }
  return ordered;
}

// `cost` falls. With `equal` the sizes of parts differ by one at most, the larger parts first.
inline Groups partition_sorted(const int64_t* cost, int32_t n, int32_t k, bool equal) {
  Groups parts;
  const Sizes sizes = sizes_of(n, k, equal);
  greedy(parts, cost, n, k, sizes);
  const int64_t bound = lower_bound_of(cost, n, k, sizes);
  const int64_t enough = bound + (bound >> kSearchPrecision);
  const std::vector<int64_t> target(k, 0);
  PartRules rules{parts, equal};
  int64_t nodes = kNodes;
  do {
    level(parts, target, cost, {bound + (bound >> kLevelPrecision), 1, kTrials, true}, rules);
    if (*std::max_element(parts.load.begin(), parts.load.end()) <= enough) break;
    if (n <= kWhole) {  // and k < n, or greedy would have reached the bound
      resplit(parts, numbers_to(k), cost, equal, enough, nodes, nodes);
      break;
    }
  } while (resplit_heaviest(parts, cost, equal, enough, nodes));
  return equal ? largest_first(std::move(parts)) : parts;
}

}  // namespace mdapo::balance
