// Levelling: exchanges of items between the heaviest group and lighter ones, the best of all pairs each time.
//
// Items are positions 0 .. n - 1 in an order of falling cost, so that a group's members, kept ascending, are its items
// from the costliest down. All costs are integers: sums are exact, and equal on every machine and in every language.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace mdapo::balance {

using Members = std::vector<int32_t>;

constexpr int32_t kPartners = 64;  // the lightest so many groups are tried as partners of a heavy one
constexpr int32_t kPatience = 16;  // and not any more after so many refusals in a row
constexpr int64_t kTrials = 1 << 16;

inline void insert_sorted(Members& members, int32_t item) {
  if (members.empty() || members.back() < item) return members.push_back(item);
  members.insert(std::lower_bound(members.begin(), members.end(), item), item);
}

inline Members numbers_to(int32_t end) {
  Members numbers(end);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

struct Groups {
  std::vector<Members> members;
  std::vector<int64_t> load;

  int32_t count() const { return static_cast<int32_t>(members.size()); }
  int64_t total() const { return std::accumulate(load.begin(), load.end(), int64_t{0}); }
  void open(int32_t groups) {
    members.assign(groups, {});
    load.assign(groups, 0);
  }
  void put(int32_t group, int32_t item, const int64_t* cost) {
    insert_sorted(members[group], item);
    load[group] += cost[item];
  }
};

// `out` leaves the heavier group, `back` comes from the lighter one (-1: nothing does); indices into their members.
struct Exchange {
  int32_t out = -1;
  int32_t back = -1;
  int64_t gain = 0;
};

// The exchange that brings two groups, `gap` apart, nearest to each other: of cost difference x, 0 < x < gap, it gains
// min(x, gap - x). Of equal gains the first `out`, then the first `back`, a move last. `fits(i, j)` may forbid it.
//
// As `out` goes down in cost, so does its ideal partner, cost[out] - gap / 2: one pointer runs along with it. From
// there gains fall to both sides, so that the search on a side ends at the first partner that is not better.
template <class Fits>
Exchange best_exchange(const Members& heavy, const Members& light, const int64_t* cost, int64_t gap, bool may_move,
                       Fits fits) {
  Exchange best;
  const auto swaps = static_cast<int32_t>(light.size());
  const int32_t partners = swaps + (may_move ? 1 : 0);
  const auto back_cost = [&](int32_t j) { return j < swaps ? cost[light[j]] : 0; };
  const auto allowed = [&](int32_t i, int32_t j) { return fits(heavy[i], j < swaps ? light[j] : -1); };
  int32_t ideal = 0;  // the first partner with x >= gap / 2
  for (int32_t i = 0; i < static_cast<int32_t>(heavy.size()); ++i) {
    const int64_t own = cost[heavy[i]];
    while (ideal < partners && 2 * (own - back_cost(ideal)) < gap) ++ideal;
    int64_t gain = best.gain;
    int32_t partner = -1;
    for (int32_t j = ideal - 1; j >= 0; --j) {
      const int64_t x = own - back_cost(j);
      if (x <= best.gain || x < gain) break;
      if (allowed(i, j)) gain = x, partner = j;
    }
    for (int32_t j = ideal; j < partners; ++j) {
      const int64_t rest = gap - (own - back_cost(j));
      if (rest <= gain) break;
      if (!allowed(i, j)) continue;
      gain = rest, partner = j;
      break;
    }
    if (partner >= 0) best = {i, partner < swaps ? partner : -1, gain};
    if (best.gain >= gap / 2) break;  // no other can be better
  }
  return best;
}

struct Levelling {
  int64_t enough;      // a group whose excess (load - target) is at most this needs no levelling
  int64_t least_gap;   // nor do groups that are no further apart
  int64_t trials;      // pairs that may be looked at
  bool only_heaviest;  // end when the heaviest group is stuck; else go on with the next heaviest
};

// Level all groups by their excess over `target`. Rules has `may_move(a, b)`, `fits(a, b, i, j)` and, after the
// exchange, `moved(a, b, i, j)`, for item i leaving group a for b and j (or -1) coming back.
//
// The larger excess of a pair falls with each exchange and the other's stays below it, so the largest never rises.
template <class Rules>
void level(Groups& groups, const std::vector<int64_t>& target, const int64_t* cost, const Levelling& how,
           Rules& rules) {
  using ByExcess = std::set<std::pair<int64_t, int32_t>>;
  ByExcess heavy;
  for (int32_t g = 0; g < groups.count(); ++g) heavy.insert({groups.load[g] - target[g], g});
  ByExcess light = heavy;
  std::vector<int32_t> refusals(groups.count(), 0);
  const auto shift = [](ByExcess& set, int32_t g, int64_t before, int64_t now) {
    if (set.erase({before, g})) set.insert({now, g});
  };
  int64_t trials = 0;
  while (!heavy.empty()) {
    const auto [excess, a] = *heavy.rbegin();
    if (excess <= how.enough) return;
    bool done = false;
    auto next = light.begin();
    for (int32_t tried = 0; tried < kPartners && next != light.end() && !done; ++tried) {
      const auto [other, b] = *next++;
      const int64_t gap = excess - other;
      if (b == a || gap <= how.least_gap) break;
      if (trials++ == how.trials) return;
      Members &from = groups.members[a], &to = groups.members[b];
      const Exchange found = best_exchange(from, to, cost, gap, rules.may_move(a, b),
                                           [&, a = a, b = b](int32_t i, int32_t j) { return rules.fits(a, b, i, j); });
      if (found.gain == 0) {
        if (++refusals[b] == kPatience) light.erase({other, b});
        continue;
      }
      const int32_t i = from[found.out], j = found.back < 0 ? -1 : to[found.back];
      const int64_t x = cost[i] - (j < 0 ? 0 : cost[j]);
      from.erase(from.begin() + found.out);
      if (j >= 0) {
        to.erase(to.begin() + found.back);
        insert_sorted(from, j);
      }
      insert_sorted(to, i);
      groups.load[a] -= x;
      groups.load[b] += x;
      rules.moved(a, b, i, j);
      for (ByExcess* set : {&heavy, &light}) {
        shift(*set, a, excess, excess - x);
        shift(*set, b, other, other + x);
      }
      refusals[b] = 0;
      done = true;
    }
    if (done) continue;
    if (how.only_heaviest) return;
    heavy.erase({excess, a});
  }
}

}  // namespace mdapo::balance
