// One mini-batch: samples -> data-parallel ranks -> micro-batches ("bins") under a cap, as many on each rank.
#pragma once

#include <optional>

#include "balance/packing.h"
#include "balance/partition.h"

namespace mdapo::balance {

constexpr int kPlanPrecision = 10;   // loads that differ by 2^-10 of the mean bin are alike
constexpr int kAlikePrecision = 12;  // ranks within 2^-12 of the mean are level enough
constexpr int kSlackPrecision = 7;   // a slot may grow by 2^-7 where that levels ranks
constexpr int kRankPrecision = 28;   // ranks are levelled to 2^-28 of the mean
constexpr int kPasses = 8;

struct Shape {
  int64_t dp;        // data-parallel ranks
  int64_t cap;       // tokens of a micro-batch
  int64_t rows;      // items of a micro-batch
  int64_t multiple;  // that divides a rank's number of micro-batches
  int64_t at_least;  // so many micro-batches a rank, if there are as many samples
  bool lockstep;     // ranks wait for each other after every micro-batch, not only after the last
  bool equal_size;   // ranks have equal numbers of samples, or one less
};

// Bins, the rank of each, and its place in the rank's order.
struct Placed {
  Bins bins;
  int32_t dp;
  Members rank, slot;

  int32_t micro() const { return bins.count() / dp; }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Micro-batches a rank that any plan has: by tokens, by items, by items longer than half the cap.
inline int64_t fewest_micro_batches(const Items& items, const Shape& shape) {
  int64_t alone = 0, half = 0, tokens = 0;
  for (int32_t i = 0; i < items.n; ++i) {
    const int64_t t = items.tokens[i];
    alone += t > shape.cap;
    half += t <= shape.cap && t > shape.cap / 2;
    tokens += t <= shape.cap ? t : 0;
  }
  const int64_t shared =
      std::max({ceil_div(items.n - alone, shape.rows), tokens ? ceil_div(tokens, shape.cap) : 0, half});
  const int64_t wanted = std::min(shape.at_least, items.n / shape.dp);
  return round_up(std::max({int64_t{1}, wanted, ceil_div(alone + shared, shape.dp)}), shape.multiple);
}

// `fill` with the smallest of low, low + step, ... for which it has an answer; `enough()` gives one for which it has.
template <class Fill, class Enough>
Bins fewest(int64_t low, int64_t step, Fill fill, Enough enough) {
  if (auto found = fill(low)) return *std::move(found);
  int64_t high = enough();
  Bins best = *fill(high);
  while (high - low > step) {
    const int64_t middle = low + (high - low) / step / 2 * step;
    if (auto found = fill(middle)) {
      high = middle;
      best = *std::move(found);
    } else {
      low = middle;
    }
  }
  return best;
}

// Bins in the order of falling load.
inline Members heaviest_first(const std::vector<int64_t>& load) {
  Members order = numbers_to(static_cast<int32_t>(load.size()));
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return load[a] > load[b]; });
  return order;
}

// The sum over slots of their heaviest bin, where each slot has the next heaviest `dp`.
inline int64_t lockstep_load(const Bins& bins, int32_t dp) {
  const Members order = heaviest_first(bins.load);
  int64_t sum = 0;
  for (size_t first = 0; first < order.size(); first += dp) sum += bins.load[order[first]];
  return sum;
}

inline Bins free_bins(const Items& items, const Shape& shape) {
  const auto dp = static_cast<int32_t>(shape.dp);
  const auto fill = [&](int64_t micro) -> std::optional<Bins> {
    const auto count = static_cast<int32_t>(micro * dp);
    const Bins empty(count, shape.cap, shape.rows);
    std::optional<Bins> best;
    int64_t best_load = 0;
    for (const Company company : {Company::kNone, Company::kMean, Company::kFull}) {
      if (best && company == Company::kFull) break;
      Bins bins = empty;
      const SlotFit fit = slot_fit(bins, dp, company, items);
      if (fit == SlotFit::kLevel) return bins;
      const int64_t load = lockstep_load(bins, dp);
      if (fit == SlotFit::kFailed || (best && load >= best_load)) continue;
      best = std::move(bins);
      best_load = load;
    }
    if (best) return best;
    best = empty;
    if (fill_range(*best, 0, count, items.by_tokens, items)) return best;
    return std::nullopt;
  };
  const auto enough = [&] {
    const int32_t tight = best_fit(items.by_tokens, items, shape.cap, shape.rows).count();
    return round_up(ceil_div(tight, shape.dp), shape.multiple);
  };
  return fewest(fewest_micro_batches(items, shape), shape.multiple, fill, enough);
}

// As many items on each rank: first the ranks, by cost or else by tokens, then the bins of each.
inline Bins equal_bins(const Items& items, const Shape& shape) {
  const auto dp = static_cast<int32_t>(shape.dp);
  std::vector<int64_t> tokens;
  for (const int32_t item : items.by_tokens) tokens.push_back(items.tokens[item]);
  std::vector<std::vector<Members>> ways(2, std::vector<Members>(dp));  // way, rank -> its items by tokens
  for (int way = 0; way < 2; ++way) {
    const Groups ranks = partition_sorted(way ? tokens.data() : items.cost, items.n, dp, true);
    std::vector<int32_t> rank_of(items.n);
    for (int32_t r = 0; r < dp; ++r) {
      for (const int32_t at : ranks.members[r]) rank_of[way ? items.by_tokens[at] : at] = r;
    }
    for (const int32_t item : items.by_tokens) ways[way][rank_of[item]].push_back(item);
  }
  const auto fill = [&](int64_t micro) -> std::optional<Bins> {
    for (const auto& ranks : ways) {
      Bins bins(static_cast<int32_t>(micro * dp), shape.cap, shape.rows);
      bool all = true;
      for (int32_t r = 0; r < dp && all; ++r) {
        const auto first = static_cast<int32_t>(r * micro), last = static_cast<int32_t>(first + micro);
        all = fill_range(bins, first, last, ranks[r], items);
      }
      if (all) return bins;
    }
    return std::nullopt;
  };
  const auto enough = [&] {
    int64_t most = 1;
    for (const Members& order : ways[1])
      most = std::max<int64_t>(most, best_fit(order, items, shape.cap, shape.rows).count());
    return round_up(most, shape.multiple);
  };
  return fewest(fewest_micro_batches(items, shape), shape.multiple, fill, enough);
}

// Exchanges between bins: the cap holds, no bin is emptied, and with `equal` no rank's number of items changes.
struct BinRules {
  Placed& plan;
  const Items& items;
  bool equal;
  std::vector<int64_t> rank_size;

  BinRules(Placed& plan, const Items& items, bool equal) : plan(plan), items(items), equal(equal), rank_size(plan.dp) {
    if (!equal) return;
    for (int32_t b = 0; b < plan.bins.count(); ++b)
      rank_size[plan.rank[b]] += static_cast<int64_t>(plan.bins.members[b].size());
  }
  bool may_move(int32_t a, int32_t b) const {
    if (plan.bins.members[a].size() < 2 || plan.bins.room(b) < 0) return false;
    return !equal || plan.rank[a] == plan.rank[b] || rank_size[plan.rank[a]] == rank_size[plan.rank[b]] + 1;
  }
  bool fits(int32_t a, int32_t b, int32_t i, int32_t j) const {
    const int64_t more = items.tokens[i] - (j < 0 ? 0 : items.tokens[j]);
    return plan.bins.tokens[b] + more <= plan.bins.cap && plan.bins.tokens[a] - more <= plan.bins.cap;
  }
  void moved(int32_t a, int32_t b, int32_t i, int32_t j) {
    const int64_t more = items.tokens[i] - (j < 0 ? 0 : items.tokens[j]);
    plan.bins.tokens[a] -= more;
    plan.bins.tokens[b] += more;
    if (equal && j < 0) --rank_size[plan.rank[a]], ++rank_size[plan.rank[b]];
  }
};

inline void order_ranks(Placed& plan) {
  std::vector<int32_t> next(plan.dp, 0);
  for (const int32_t b : heaviest_first(plan.bins.load)) plan.slot[b] = next[plan.rank[b]]++;
}

inline void order_slots(Placed& plan) {
  int32_t at = 0;
  for (const int32_t b : heaviest_first(plan.bins.load)) plan.slot[b] = at++ / plan.dp;
}

// The bins of each slot to ranks, the heaviest to the one that has least so far; slots of most spread first.
inline void share_slots(Placed& plan) {
  std::vector<Members> slots(plan.micro());
  for (const int32_t b : heaviest_first(plan.bins.load)) slots[plan.slot[b]].push_back(b);
  std::vector<int64_t> spread, total(plan.dp);
  for (const Members& slot : slots) spread.push_back(plan.bins.load[slot.front()] - plan.bins.load[slot.back()]);
  for (const int32_t s : heaviest_first(spread)) {
    Members ranks = numbers_to(plan.dp);
    std::stable_sort(ranks.begin(), ranks.end(), [&](int32_t a, int32_t b) { return total[a] < total[b]; });
    for (int32_t r = 0; r < plan.dp; ++r) {
      plan.rank[slots[s][r]] = ranks[r];
      total[ranks[r]] += plan.bins.load[slots[s][r]];
    }
  }
}

// The heaviest bin of each bin's slot.
inline std::vector<int64_t> slot_heights(const Placed& plan) {
  std::vector<int64_t> heaviest(plan.micro()), height(plan.bins.count());
  for (int32_t b = 0; b < plan.bins.count(); ++b)
    heaviest[plan.slot[b]] = std::max(heaviest[plan.slot[b]], plan.bins.load[b]);
  for (int32_t b = 0; b < plan.bins.count(); ++b) height[b] = heaviest[plan.slot[b]];
  return height;
}

// Lower the sum over slots of their heaviest bin: level all bins by what each lacks to its slot's heaviest, again and
// again. With `equal` the slots are each rank's bins in their order, else they are made of whichever bins are alike.
inline void level_slots(Placed& plan, const Items& items, bool equal) {
  const int32_t count = plan.bins.count();
  const int64_t alike = plan.bins.total() / count >> kPlanPrecision;
  BinRules rules(plan, items, equal);
  int64_t before = INT64_MAX;
  for (int pass = 0;; ++pass) {
    equal ? order_ranks(plan) : order_slots(plan);
    const std::vector<int64_t> height = slot_heights(plan);
    int64_t now = 0;
    for (const int64_t h : height) now += h / plan.dp;
    if (pass == kPasses || before - now <= alike) return;
    before = now;
    level(plan.bins, height, items.cost, {INT64_MIN, alike, kTrials, false}, rules);
  }
}

inline Levelling of_ranks(const Groups& ranks) {
  const int64_t mean = ceil_div(ranks.total(), ranks.count());
  return {mean + (mean >> kRankPrecision), 1, kTrials, true};
}

// Lower the heaviest rank's load by swaps of whole bins, which no cap forbids; with `in_slots` within a slot only.
inline void swap_bins(Placed& plan, bool in_slots) {
  struct Rules {
    const Members& order;
    const Members& slot;
    bool in_slots;

    bool may_move(int32_t, int32_t) const { return false; }
    bool fits(int32_t, int32_t, int32_t i, int32_t j) const { return !in_slots || slot[order[i]] == slot[order[j]]; }
    void moved(int32_t, int32_t, int32_t, int32_t) const {}
  };
  const Members order = heaviest_first(plan.bins.load);
  std::vector<int64_t> load;
  Groups ranks;
  ranks.open(plan.dp);
  for (const int32_t b : order) load.push_back(plan.bins.load[b]);
  for (int32_t at = 0; at < plan.bins.count(); ++at) ranks.put(plan.rank[order[at]], at, load.data());
  Rules rules{order, plan.slot, in_slots};
  level(ranks, std::vector<int64_t>(plan.dp, 0), load.data(), of_ranks(ranks), rules);
  for (int32_t r = 0; r < plan.dp; ++r) {
    for (const int32_t at : ranks.members[r]) plan.rank[order[at]] = r;
  }
}

// Exchanges between ranks: an item that moves goes to the bin with most room; no bin grows beyond its `ceiling`.
struct RankRules {
  Placed& plan;
  const Items& items;
  const Groups& ranks;
  bool equal;
  std::vector<int64_t> ceiling;
  std::vector<Members> bins_of;  // rank -> its bins
  Members bin_of;                // item -> its bin
  Members roomiest;              // rank -> its bin with most room

  RankRules(Placed& plan, const Items& items, const Groups& ranks, bool equal, std::vector<int64_t> ceiling)
      : plan(plan),
        items(items),
        ranks(ranks),
        equal(equal),
        ceiling(std::move(ceiling)),
        bins_of(plan.dp),
        bin_of(items.n),
        roomiest(plan.dp) {
    for (int32_t b = 0; b < plan.bins.count(); ++b) {
      bins_of[plan.rank[b]].push_back(b);
      for (const int32_t item : plan.bins.members[b]) bin_of[item] = b;
    }
    for (int32_t r = 0; r < plan.dp; ++r) find_roomiest(r);
  }
  void find_roomiest(int32_t r) {
    const auto less = [&](int32_t a, int32_t b) { return plan.bins.room(a) < plan.bins.room(b); };
    roomiest[r] = *std::max_element(bins_of[r].begin(), bins_of[r].end(), less);
  }
  bool may_move(int32_t a, int32_t b) const { return PartRules{ranks, equal}.may_move(a, b); }
  bool fits(int32_t, int32_t b, int32_t i, int32_t j) const {
    const Bins& bins = plan.bins;
    const int32_t from = bin_of[i], to = j < 0 ? roomiest[b] : bin_of[j];
    const int64_t tokens = items.tokens[i] - (j < 0 ? 0 : items.tokens[j]),
                  x = items.cost[i] - (j < 0 ? 0 : items.cost[j]);
    if (bins.load[to] + x > ceiling[to]) return false;
    if (j < 0) return bins.members[from].size() > 1 && tokens <= bins.room(to);
    return bins.tokens[to] + tokens <= bins.cap && bins.tokens[from] - tokens <= bins.cap;
  }
  void moved(int32_t a, int32_t b, int32_t i, int32_t j) {
    const int32_t from = bin_of[i], to = j < 0 ? roomiest[b] : bin_of[j];
    shift(i, from, to);
    if (j >= 0) shift(j, to, from);
    find_roomiest(a);
    find_roomiest(b);
  }
  void shift(int32_t item, int32_t from, int32_t to) {
    plan.bins.take(from, item, items);
    plan.bins.add(to, item, items);
    bin_of[item] = to;
  }
};

// Lower the heaviest rank's load by exchanges of items, with no bin above its `ceiling`.
inline void level_ranks(Placed& plan, const Items& items, bool equal, std::vector<int64_t> ceiling) {
  Groups ranks;
  ranks.open(plan.dp);
  for (int32_t b = 0; b < plan.bins.count(); ++b) {
    Members& members = ranks.members[plan.rank[b]];
    members.insert(members.end(), plan.bins.members[b].begin(), plan.bins.members[b].end());
    ranks.load[plan.rank[b]] += plan.bins.load[b];
  }
  for (Members& members : ranks.members) std::sort(members.begin(), members.end());
  RankRules rules(plan, items, ranks, equal, std::move(ceiling));
  level(ranks, std::vector<int64_t>(plan.dp, 0), items.cost, of_ranks(ranks), rules);
}

// Whether the heaviest rank is so near to the mean that to level further is worth nothing of the lockstep.
inline bool ranks_alike(const Placed& plan) {
  std::vector<int64_t> load(plan.dp);
  for (int32_t b = 0; b < plan.bins.count(); ++b) load[plan.rank[b]] += plan.bins.load[b];
  const int64_t mean = ceil_div(plan.bins.total(), plan.dp);
  return *std::max_element(load.begin(), load.end()) <= mean + (mean >> kAlikePrecision);
}

inline Placed plan_sorted(const Items& items, const Shape& shape) {
  Bins bins = shape.equal_size ? equal_bins(items, shape) : free_bins(items, shape);
  const int32_t count = bins.count();
  Placed plan{std::move(bins), static_cast<int32_t>(shape.dp), Members(count), Members(count)};
  if (shape.equal_size) {
    for (int32_t b = 0; b < count; ++b) plan.rank[b] = b / plan.micro();
  }
  level_slots(plan, items, shape.equal_size);
  if (!shape.equal_size) share_slots(plan);
  // Ranks are first levelled at no cost to the lockstep; if that is not enough, at little, or, where it does not
  // matter, without regard for it.
  if (!shape.equal_size) swap_bins(plan, true);
  level_ranks(plan, items, shape.equal_size, slot_heights(plan));
  if (!ranks_alike(plan)) {
    std::vector<int64_t> ceiling(count, INT64_MAX);
    if (shape.lockstep) {
      ceiling = slot_heights(plan);
      for (int64_t& height : ceiling) height += height >> kSlackPrecision;
    } else if (!shape.equal_size) {
      swap_bins(plan, false);
    }
    level_ranks(plan, items, shape.equal_size, std::move(ceiling));
  }
  order_ranks(plan);
  return plan;
}

}  // namespace mdapo::balance
