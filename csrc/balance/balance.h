// Balancing a ragged batch: items into parts, and a step's samples into ranks and micro-batches under a token cap.
//
// Pure C++17, on the host whatever the device; mdapo/ops/balance.py says what is computed and after whom, and
// mdapo/ops/balance_reference computes the same, bit for bit. The parts: level.h (exchanges between groups),
// partition.h, packing.h (bins under a cap), plan.h (one mini-batch).
#pragma once

#include <stdexcept>
#include <string>

#include "balance/plan.h"

namespace mdapo::balance {

constexpr int64_t kMaxTotal = int64_t{1} << 61;  // sums of all costs and of all tokens; differences of two fit too
constexpr int64_t kMaxItems = int64_t{1} << 28;

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

inline void require_total(const char* what, const int64_t* values, int64_t n) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (values[i] < 0) throw std::invalid_argument(std::string(what) + ": negative");
    if (values[i] > kMaxTotal - total) throw std::invalid_argument(std::string(what) + ": the sum is above 2^61");
    total += values[i];
  }
}

// `order` by falling values, equal ones as they were: byte by byte from the lowest, those bytes that differ at all.
inline void sort_falling(const int64_t* values, Members& order) {
  if (order.size() < 256) {
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
    return;
  }
  uint64_t differ = 0;
  for (const int32_t item : order) differ |= static_cast<uint64_t>(values[item] ^ values[order[0]]);
  struct Key {
    uint64_t value;
    int32_t item;
  };
  std::vector<Key> keys, sorted(order.size());
  keys.reserve(order.size());
  for (const int32_t item : order) keys.push_back({~static_cast<uint64_t>(values[item]), item});
  for (int shift = 0; shift < 64; shift += 8) {
    if ((differ >> shift & 0xff) == 0) continue;
    size_t start[257] = {};
    for (const Key& key : keys) ++start[(key.value >> shift & 0xff) + 1];
    for (int byte = 0; byte < 256; ++byte) start[byte + 1] += start[byte];
    for (const Key& key : keys) sorted[start[key.value >> shift & 0xff]++] = key;
    keys.swap(sorted);
  }
  for (size_t i = 0; i < order.size(); ++i) order[i] = keys[i].item;
}

inline std::vector<int64_t> gathered(const int64_t* values, const Members& order) {
  std::vector<int64_t> result;
  result.reserve(order.size());
  for (const int32_t item : order) result.push_back(values[item]);
  return result;
}

// The items part by part, ascending within each, and where the parts end. Throws std::invalid_argument.
inline void partition(const int64_t* cost_N, int64_t n, int64_t k, bool equal_size, int64_t* items_N, int64_t* ends_K) {
  require(k >= 1 && k <= kMaxItems && n <= kMaxItems, "k: at least 1, and neither k nor the items above 2^28");
  require_total("costs", cost_N, n);
  Members order = numbers_to(static_cast<int32_t>(n));
  sort_falling(cost_N, order);
  const std::vector<int64_t> cost = gathered(cost_N, order);
  const Groups parts = partition_sorted(cost.data(), static_cast<int32_t>(n), static_cast<int32_t>(k), equal_size);
  Members part_of(n);
  std::vector<int64_t> next(k);
  int64_t end = 0;
  for (int32_t p = 0; p < parts.count(); ++p) {
    next[p] = end;
    ends_K[p] = end += static_cast<int64_t>(parts.members[p].size());
    for (const int32_t at : parts.members[p]) part_of[order[at]] = p;
  }
  for (int64_t item = 0; item < n; ++item) items_N[next[part_of[item]]++] = item;
}

// Each sample's rank and its micro-batch there, and for each mini-batch how many micro-batches every rank has (0 where
// the mini-batch is empty). Throws std::invalid_argument.
inline void plan(const int64_t* tokens_N, const int64_t* cost_N, const int64_t* mini_N, int64_t n, int64_t minis,
                 Shape shape, int64_t* rank_N, int64_t* micro_N, int64_t* count_M) {
  require(shape.dp >= 1 && shape.cap >= 0 && shape.rows >= 1 && shape.multiple >= 1 && shape.at_least >= 1,
          "dp, rows, multiple and at_least are at least 1, cap is at least 0");
  require(n <= kMaxItems && shape.dp <= kMaxItems && shape.multiple <= kMaxItems / shape.dp,
          "more than 2^28 samples or micro-batches");
  require_total("costs", cost_N, n);
  require_total("tokens", tokens_N, n);
  shape.cap = std::min(shape.cap, kMaxTotal);
  std::vector<int64_t> cost_of(cost_N, cost_N + n);  // nothing is for free: no rank shall have all the cheap ones
  for (int64_t& cost : cost_of) cost = std::max<int64_t>(cost, 1);
  std::vector<Members> members(minis);
  for (int64_t i = 0; i < n; ++i) {
    require(mini_N[i] >= 0 && mini_N[i] < minis, "mini: out of range");
    members[mini_N[i]].push_back(static_cast<int32_t>(i));
  }
  for (int64_t m = 0; m < minis; ++m) {
    count_M[m] = 0;
    if (members[m].empty()) continue;
    Members order = members[m];  // by falling cost, then falling tokens: what follows depends on the values alone
    sort_falling(tokens_N, order);
    sort_falling(cost_of.data(), order);
    const std::vector<int64_t> cost = gathered(cost_of.data(), order), tokens = gathered(tokens_N, order);
    Members by_tokens = numbers_to(static_cast<int32_t>(order.size()));
    sort_falling(tokens.data(), by_tokens);
    const Items items{cost.data(), tokens.data(), static_cast<int32_t>(order.size()), std::move(by_tokens)};
    const Placed placed = plan_sorted(items, shape);
    count_M[m] = placed.micro();
    for (int32_t b = 0; b < placed.bins.count(); ++b) {
      for (const int32_t at : placed.bins.members[b]) {
        rank_N[order[at]] = placed.rank[b];
        micro_N[order[at]] = placed.slot[b];
      }
    }
  }
}

}  // namespace mdapo::balance
