// Bins of at most `cap` tokens and `rows` items each: three ways to fill a given number of them.
//
// Items are positions in an order of falling cost, as everywhere in this folder; `by_tokens` are the same positions in
// an order of falling tokens. An item longer than the cap has a bin to itself.
#pragma once

#include <functional>
#include <queue>

#include "balance/level.h"

namespace mdapo::balance {

struct Items {
  const int64_t* cost;
  const int64_t* tokens;
  int32_t n;
  Members by_tokens;
};

struct Bins : Groups {
  int64_t cap, rows;
  std::vector<int64_t> tokens;

  Bins(int32_t bins, int64_t cap, int64_t rows) : cap(cap), rows(rows), tokens(bins) { open(bins); }
  void append() {
    members.emplace_back();
    load.push_back(0);
    tokens.push_back(0);
  }
  void clear(int32_t bin) {
    members[bin].clear();
    load[bin] = tokens[bin] = 0;
  }
  int64_t room(int32_t bin) const { return static_cast<int64_t>(members[bin].size()) < rows ? cap - tokens[bin] : -1; }
  bool fits(int32_t bin, int64_t more) const { return more <= room(bin) || members[bin].empty(); }
  void add(int32_t bin, int32_t item, const Items& items) {
    put(bin, item, items.cost);
    tokens[bin] += items.tokens[item];
  }
  void take(int32_t bin, int32_t item, const Items& items) {
    members[bin].erase(std::lower_bound(members[bin].begin(), members[bin].end(), item));
    load[bin] -= items.cost[item];
    tokens[bin] -= items.tokens[item];
  }
};

// Swap an item of bin `a` for one of `b` so that `a` has more room: at least `need`, and as little above it as can be;
// else as much as can be, within the room of `b`.
inline void gather_room(Bins& bins, int32_t a, int32_t b, int64_t need, const Items& items) {
  int64_t best = 0;
  int32_t out = -1, in = -1;
  for (const int32_t i : bins.members[a]) {
    for (const int32_t j : bins.members[b]) {
      const int64_t more = items.tokens[i] - items.tokens[j];
      if (more <= 0 || more > bins.cap - bins.tokens[b]) continue;
      if (best >= need ? more < need || more >= best : more <= best) continue;
      best = more, out = i, in = j;
    }
  }
  if (best == 0) return;
  bins.take(a, out, items);
  bins.take(b, in, items);
  bins.add(a, in, items);
  bins.add(b, out, items);
}

// The longest first, each into the lightest of the bins first .. last - 1 that has room; false when one finds none.
//
// A bin that is too full for an item waits until items are short enough. When all wait, the roomiest one gathers room
// from the next ones.
inline bool lightest_fit(Bins& bins, int32_t first, int32_t last, const Members& order, const Items& items) {
  using Entry = std::pair<int64_t, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> by_load;
  std::set<Entry> waiting;  // by room, the roomiest first
  const auto wait = [&](int32_t bin) {
    if (bins.room(bin) >= 0) waiting.insert({-bins.room(bin), bin});
  };
  const auto next_waiting = [&] { return waiting.extract(waiting.begin()).value().second; };
  for (int32_t bin = first; bin < last; ++bin) by_load.emplace(bins.load[bin], bin);
  for (const int32_t item : order) {
    const int64_t tokens = items.tokens[item];
    while (!waiting.empty() && -waiting.begin()->first >= tokens) {
      const int32_t bin = next_waiting();
      by_load.emplace(bins.load[bin], bin);
    }
    while (!by_load.empty() && !bins.fits(by_load.top().second, tokens)) {
      wait(by_load.top().second);
      by_load.pop();
    }
    if (by_load.empty()) {
      if (waiting.empty()) return false;
      const int32_t roomiest = next_waiting();
      Members asked;
      while (bins.room(roomiest) < tokens && asked.size() < kPartners && !waiting.empty()) {
        asked.push_back(next_waiting());
        gather_room(bins, roomiest, asked.back(), tokens - bins.room(roomiest), items);
      }
      if (bins.room(roomiest) < tokens) return false;
      for (const int32_t bin : asked) wait(bin);
      by_load.emplace(bins.load[roomiest], roomiest);
    }
    const int32_t bin = by_load.top().second;
    by_load.pop();
    bins.add(bin, item, items);
    by_load.emplace(bins.load[bin], bin);
  }
  return true;
}

// The longest first, each into the fullest bin that has room, or a new one (best fit decreasing): few bins, not level.
inline Bins best_fit(const Members& order, const Items& items, int64_t cap, int64_t rows) {
  Bins bins(0, cap, rows);
  std::set<std::pair<int64_t, int32_t>> by_room;
  for (const int32_t item : order) {
    const auto found = by_room.lower_bound({items.tokens[item], -1});
    int32_t bin = bins.count();
    if (found == by_room.end()) {
      bins.append();
    } else {
      bin = found->second;
      by_room.erase(found);
    }
    bins.add(bin, item, items);
    if (bins.room(bin) >= 0) by_room.insert({bins.room(bin), bin});
  }
  return bins;
}

// More bins, until there are `count`, by halving the ones with most items: no rank shall idle where another has two.
inline void split_bins(Bins& bins, int32_t count, const Items& items) {
  std::set<std::pair<int64_t, int32_t>> by_size;  // most items first, then the first bin
  const auto size = [&](int32_t bin) { return -static_cast<int64_t>(bins.members[bin].size()); };
  for (int32_t bin = 0; bin < bins.count(); ++bin) by_size.insert({size(bin), bin});
  while (bins.count() < count) {
    const int32_t bin = bins.count();
    bins.append();
    if (by_size.empty() || by_size.begin()->first > -2) continue;
    const int32_t largest = by_size.begin()->second;
    by_size.erase(by_size.begin());
    const Members both = std::move(bins.members[largest]);
    bins.clear(largest);
    for (size_t i = 0; i < both.size(); ++i) bins.add(i % 2 ? bin : largest, both[i], items);
    by_size.insert({size(largest), largest});
    by_size.insert({size(bin), bin});
  }
}

// The bins first .. last - 1, level if that can be, else tight; false when the items need more bins.
inline bool fill_range(Bins& bins, int32_t first, int32_t last, const Members& order, const Items& items) {
  if (lightest_fit(bins, first, last, order, items)) return true;
  Bins tight = best_fit(order, items, bins.cap, bins.rows);
  if (tight.count() > last - first) return false;
  split_bins(tight, last - first, items);
  for (int32_t bin = first; bin < last; ++bin) {
    bins.members[bin] = std::move(tight.members[bin - first]);
    bins.load[bin] = tight.load[bin - first];
    bins.tokens[bin] = tight.tokens[bin - first];
  }
  return true;
}

// Positions that are still to be had, and the first of them at or after a given one.
class Remaining {
 public:
  explicit Remaining(int32_t n) : next_(n + 1) { std::iota(next_.begin(), next_.end(), 0); }
  int32_t at_or_after(int32_t position) {
    int32_t found = position;
    while (next_[found] != found) found = next_[found];
    while (next_[position] != found) position = std::exchange(next_[position], found);  // later searches jump
    return found;
  }
  void take(int32_t position) { next_[position] = position + 1; }

 private:
  std::vector<int32_t> next_;
};

enum class SlotFit { kFailed, kLevel, kPeeled };
enum class Company { kNone, kMean, kFull };  // what a costly item shares its bin with: up to how many tokens

// Slots of `dp` bins that run side by side, each as level as can be.
//
// An item that costs more than the mean of the bins left cannot be levelled out: its slot lasts as long as it does. So
// the other bins of that slot are filled to the same cost, with the costliest items that fit; and so on, slot by slot,
// until no such item is left ("peeled" slots). The rest goes to the lightest bins. The less company the costly item
// has, the less its slot costs, and the more tokens are left for the others. Fails when the cap leaves no room for
// them.
inline SlotFit slot_fit(Bins& bins, int32_t dp, Company company, const Items& items) {
  const int32_t n = items.n;
  std::vector<int64_t> longest_from(n + 1);  // of all items at or after a position
  for (int32_t i = n - 1; i >= 0; --i) longest_from[i] = std::max(items.tokens[i], longest_from[i + 1]);
  Remaining remaining(n);
  int64_t work = std::accumulate(items.cost, items.cost + n, int64_t{0});
  int64_t tokens = std::accumulate(items.tokens, items.tokens + n, int64_t{0});
  int32_t left = n, bin = 0;
  const auto take = [&](int32_t item) {
    remaining.take(item);
    bins.add(bin, item, items);
    work -= items.cost[item];
    tokens -= items.tokens[item];
    --left;
  };
  const auto first_that_fits = [&](int64_t money) {
    const auto dear = [&](int64_t c) { return c > money; };
    const auto long_ = [&, room = bins.room(bin)](int64_t t) { return t > room; };
    const auto affordable = std::partition_point(items.cost, items.cost + n, dear) - items.cost;
    const auto fitting =
        std::partition_point(longest_from.begin(), longest_from.end() - 1, long_) - longest_from.begin();
    return remaining.at_or_after(static_cast<int32_t>(std::max<int64_t>(affordable, fitting)));
  };
  while (bin < bins.count() && left > 0) {
    const int32_t bins_left = bins.count() - bin, costliest = remaining.at_or_after(0);
    if (items.cost[costliest] <= work / bins_left) break;
    const int64_t free = std::max<int64_t>(0, std::min(tokens / bins_left, bins.cap) - items.tokens[costliest]);
    const __int128 filling =
        static_cast<__int128>(free) * items.cost[n - 1] / std::max<int64_t>(1, items.tokens[n - 1]);
    int64_t goal = items.cost[costliest];
    if (company == Company::kMean) goal += static_cast<int64_t>(std::min<__int128>(filling, work));
    if (company == Company::kFull) goal += work;
    for (int32_t r = 0; r < dp && left > 0; ++r, ++bin) {
      take(remaining.at_or_after(0));
      while (left > bins.count() - bin - 1) {  // the other bins need one each
        const int32_t item = first_that_fits(goal - bins.load[bin]);
        if (item == n) break;
        take(item);
      }
    }
  }
  Members rest;
  for (const int32_t item : items.by_tokens) {
    if (remaining.at_or_after(item) == item) rest.push_back(item);
  }
  if (!lightest_fit(bins, bin, bins.count(), rest, items)) return SlotFit::kFailed;
  return bin > 0 ? SlotFit::kPeeled : SlotFit::kLevel;
}

}  // namespace mdapo::balance
