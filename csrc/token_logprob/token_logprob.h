// token_logprob: what all backends share about one tile of logits. Pure C++17, no torch, no device runtime.
//
// A tile is `rows` scored tokens by `cols` neighbouring ids of the vocabulary; the formulas are in README.md.
#pragma once

#include <cmath>
#include <limits>

#include "token_logprob/token_logprob_tile.h"

namespace mdapo::token_logprob {

// max(d, lowest) that keeps NaN.
template <class A>
MDAPO_HOST_DEVICE A bounded(A d) {
  return d < lowest<A>() ? lowest<A>() : d;
}

template <class A>
MDAPO_HOST_DEVICE A exp_or_zero(A d) {
  return d <= lowest<A>() ? A(0) : std::exp(d);
}

// What x is taken relative to: where all are -inf, anything finite does.
template <class A>
MDAPO_HOST_DEVICE A base_of(A largest) {
  return largest == -std::numeric_limits<A>::infinity() ? A(0) : largest;
}

// Sums over some columns of a row, relative to the largest x among them.
template <class A>
struct Partial {
  A largest;  // m = max x; -inf over no column
  A sum;      // sum exp(x - m)
  A moment;   // sum exp(x - m) (x - m)
};

template <class A>
MDAPO_HOST_DEVICE Partial<A> empty_partial() {
  return {-std::numeric_limits<A>::infinity(), A(0), A(0)};
}

// Adds a column: d = bounded(x - base_of(part.largest)).
template <class A>
MDAPO_HOST_DEVICE void add(Partial<A>& part, A d) {
  const A e = exp_or_zero(d);
  part.sum += e;
  part.moment += e * d;
}

// The same sums relative to `largest` >= part.largest.
template <class A>
MDAPO_HOST_DEVICE Partial<A> rebased(const Partial<A>& part, A largest) {
  const A d = part.largest == largest ? A(0) : bounded(part.largest - largest);  // equal also where both are -inf
  const A factor = exp_or_zero(d);
  return {largest, part.sum * factor, (part.moment + part.sum * d) * factor};
}

// Sums over the columns of both. Not exactly associative: every backend merges in a fixed order.
template <class A>
MDAPO_HOST_DEVICE Partial<A> merged(const Partial<A>& a, const Partial<A>& b) {
  const A largest = b.largest > a.largest ? b.largest : a.largest;
  const Partial<A> p = rebased(a, largest), q = rebased(b, largest);
  return {largest, p.sum + q.sum, p.moment + q.moment};
}

// What the gradient of one row's logits needs. lse comes in two parts, so that large logits cost no digits of p.
template <class A>
struct RowTerms {
  A base, log_sum, entropy, grad_logp, grad_entropy;

  // log p of a column.
  MDAPO_HOST_DEVICE A log_p(A x) const { return x - base - log_sum; }

  // A row without a gradient is left out altogether, whatever else it holds.
  MDAPO_HOST_DEVICE bool idle() const { return grad_logp == A(0) && grad_entropy == A(0); }
};

// d loss / d logit of a column with log p = u; `scale` is 1 / temperature.
template <class A>
MDAPO_HOST_DEVICE A gradient(const RowTerms<A>& row, A scale, A u, bool is_target) {
  u = bounded(u);
  const A p = exp_or_zero(u);
  // expm1: for a target that is nearly certain, 1 - p keeps its digits.
  const A pull = row.grad_logp * (is_target ? std::expm1(u) : p);
  return -scale * (pull + row.grad_entropy * p * (u + row.entropy));
}

}  // namespace mdapo::token_logprob
