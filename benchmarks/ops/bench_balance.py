"""Partitions and whole-step plans against differencing (Karmarkar-Karp) and first fit, over several seeds.

    python benchmarks/ops/bench_balance.py

A sequence of L tokens weighs 24576 L + L^2, about a model of hidden size 4096. Imbalance is the heaviest part over the
mean, and stands over the lower bound max(mean, heaviest item, k-th + (k+1)-th) as goals do. "32k-heavy": a twentieth of
the samples between 16k and 32k tokens (many at 32k), the others lognormal around 1.5k; "long tail": lognormal around
1.8k, cut at 32k. The cap is 32k. "Ideal" is the step's work over its ranks, with no regard for what a cap or a single
long sample forces; "bound" has that regard (`lockstep_bound`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
from _goals import Goal, alternate, milliseconds, ratio, show
from balance_peers import differencing, differencing_equal, differencing_sparse, first_fit, strict_differencing

from mdapo.ops.balance import Plan, partition, plan_step

SEEDS = range(5)
CAP = 32768
TAILS = ("32k-heavy", "long tail")


def lengths_of(kind: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "bimodal":
        drawn = np.where(rng.random(n) < 0.5, rng.normal(500, 50, n), rng.normal(8000, 800, n))
    elif kind == "equal":
        drawn = np.full(n, 1000)
    elif kind == "32k-heavy":
        drawn = np.where(rng.random(n) < 0.05, rng.uniform(16000, 40000, n), rng.lognormal(7.3, 0.9, n))
    else:  # lognormal, and long tail
        drawn = rng.lognormal(7.5, 1.2, n)
    return np.clip(drawn.astype(np.int64), 1, CAP)


def work(lengths: np.ndarray) -> np.ndarray:
    return lengths * (24576 + lengths)


def heaviest(costs: np.ndarray, parts: Sequence[Sequence[int]]) -> float:
    return max(float(costs[list(part)].sum()) for part in parts)


def bound(costs: np.ndarray, k: int) -> float:
    falling = np.sort(costs)[::-1]
    return float(max(costs.sum() / k, falling[0], falling[k - 1 : k + 1].sum()))


def over_bound(kind: str, n: int, k: int, *, equal: bool, part: Callable[..., Sequence[Sequence[int]]]) -> float:
    """The worst seed's heaviest part over the bound."""
    found = []
    for seed in SEEDS:
        costs = work(lengths_of(kind, n, seed))
        found.append(heaviest(costs, part(costs, k)) / bound(costs, k))
    return max(found)


# Plans.


def loads_of(plan: Plan, costs: np.ndarray) -> np.ndarray:
    """[rank, micro]"""
    table = np.zeros((plan.dp, plan.counts_M[0]))
    np.add.at(table, (plan.rank_N, plan.micro_N), costs)
    return table


def table_of(ranks: list[list[list[int]]], costs: np.ndarray) -> np.ndarray:
    """[rank, micro], the heavy ones first on every rank: what lockstep costs least."""
    return -np.sort([[-float(costs[micro].sum()) for micro in rank] for rank in ranks], 1)


def times(table: np.ndarray) -> tuple[float, float]:
    """Lockstep and slowest rank, over the ideal."""
    ideal = table.sum() / len(table)
    return float(table.max(0).sum() / ideal), float(table.sum(1).max() / ideal)


def lockstep_bound(lengths: np.ndarray, costs: np.ndarray, dp: int, micro: int) -> float:
    """No plan of ``micro`` micro-batches a rank has a lower lockstep load; over the ideal.

    Samples longer than half the cap are in micro-batches of their own, which have at most their cost and the best use
    of the rest of the cap; the others at most the best use of the cap by short samples. Slots as high as needed for all
    work, filled from the highest, the k-th of them at least as high as the (k dp + 1)-th long sample.
    """
    order = np.argsort(lengths)
    density = np.maximum.accumulate((costs / lengths)[order])

    def best_use(tokens: np.ndarray) -> np.ndarray:
        fitting = np.searchsorted(lengths[order], tokens, side="right")
        return np.where(fitting > 0, tokens * density[fitting - 1], 0.0)

    long = np.flatnonzero(lengths > CAP // 2)
    short = density[np.searchsorted(lengths[order], CAP // 2, side="right") - 1] * CAP
    limits = np.full(micro * dp, short)
    limits[: len(long)] = costs[long] + best_use(CAP - lengths[long])
    limits = -np.sort(-limits).reshape(micro, dp)
    falling = -np.sort(-costs[long])
    height = np.array([falling[s * dp] if s * dp < len(long) else 0.0 for s in range(micro)], float)
    missing = costs.sum() - np.minimum(limits, height[:, None]).sum()
    steps = []  # raising a slot from one limit to the next adds work at the rate of its bins that are not full
    for slot, low in zip(limits, height, strict=True):
        for high in np.unique(slot[slot > low]):
            steps.append((-int((slot > low).sum()), high - low))
            low = high
    total = height.sum()
    for rate, rise in sorted(steps):
        used = min(rise, max(missing, 0.0) / -rate)
        total, missing = total + used, missing - used * -rate
    return float(total / (costs.sum() / dp))


def plan_goals(n: int, dp: int) -> list[Goal]:
    """Over kinds of lengths and seeds, the worst of each."""
    over, counts, steps, bounds, slow, notes = 0, [], [], [], [], []
    for kind in TAILS:
        for seed in SEEDS:
            lengths = lengths_of(kind, n, seed)
            costs = work(lengths)
            by_rank = plan_step(lengths, dp=dp, cap=CAP, costs_N=costs)
            in_step = plan_step(lengths, dp=dp, cap=CAP, costs_N=costs, objective="lockstep")
            for plan in (by_rank, in_step):
                over += sum(int(lengths[group].sum()) > CAP for group in plan.groups)
            counts.append(by_rank.counts_M[0] / -(-int(lengths.sum()) // (CAP * dp)))
            lock, _ = times(loads_of(in_step, costs))
            steps.append(lock)
            bounds.append(lock / lockstep_bound(lengths, costs, dp, in_step.counts_M[0]))
            peers = [
                times(table_of(peer(lengths, costs, dp=dp, cap=CAP), costs))
                for peer in (strict_differencing, first_fit)
            ]
            slow.append(max(times(loads_of(plan, costs))[1] for plan in (by_rank, in_step)) / peers[0][1])
            notes.append([lock, times(loads_of(by_rank, costs))[1], *peers[0], *peers[1]])
    mean = np.mean(notes, 0)
    ours, theirs = f"mean lockstep {mean[0]:.3f}, slowest {mean[1]:.4f}", "KK {:.3f}, {:.4f}; first fit {:.3f}, {:.4f}"
    what = f"plan {n}/{dp}"
    goals = [Goal(f"{what}: micro-batches over the cap", over, 0, at_most=True, unit="")]
    if n // dp >= 64:
        goals.append(Goal(f"{what}: micro-batches / token bound", max(counts), 1.02, at_most=True))
        goals.append(Goal(f"{what}: lockstep / ideal", max(steps), 1.05, at_most=True, note=ours))
    goals.append(Goal(f"{what}: lockstep / bound", max(bounds), 1.05, at_most=True, note=ours))
    goals.append(
        Goal(f"{what}: slowest rank / strict-cap KK's", max(slow), 1.0, at_most=True, note=theirs.format(*mean[2:]))
    )
    return goals


# Speed.


def speed_goals() -> list[Goal]:
    costs = work(lengths_of("lognormal", 4096, 0))
    plain = costs.tolist()
    free = alternate(
        {
            "KK": lambda: differencing(plain, 64),
            "lean KK": lambda: differencing_sparse(plain, 64),
            "ours": lambda: [partition(costs, 64) for _ in range(20)],
        },
        rounds=3,
        repeat=1,
    )
    equal = alternate(
        {"KK": lambda: differencing_equal(plain, 64), "ours": lambda: partition(costs, 64, equal_size=True)}
    )
    free["ours"] = [seconds / 20 for seconds in free["ours"]]
    lean = f", KK without empty sets {milliseconds(free['lean KK'])}"
    goals = [
        Goal(
            f"partition 4096/64 {name}, against KK in Python",
            ratio(s["KK"], s["ours"]),
            limit,
            note=f"KK {milliseconds(s['KK'])}, ours {milliseconds(s['ours'])}{more}",
        )
        for name, s, limit, more in (("free", free, 500, lean), ("equal", equal, 20, ""))
    ]
    many = work(lengths_of("lognormal", 131072, 0))
    lengths = lengths_of("long tail", 131072, 0)
    large = alternate(
        {
            "free": lambda: partition(many, 512),
            "equal": lambda: partition(many, 512, equal_size=True),
            "plan": lambda: plan_step(lengths, dp=4096, cap=CAP, costs_N=many).groups,
        },
        rounds=5,
        repeat=2,
    )
    limits = {"free": ("partition 131072/512 free", 60), "equal": ("partition 131072/512 equal", 60)}
    limits["plan"] = ("plan of 131,072 samples for 4,096 ranks", 250)
    for name, (what, limit) in limits.items():
        goals.append(Goal(what, float(np.median(large[name])) * 1e3, limit, at_most=True, unit="ms"))
    return goals


def measure() -> list[Goal]:
    goals = []
    for equal in (False, True):
        sizes = "equal" if equal else "free"
        for kind in ("lognormal", "bimodal", "equal"):
            found = over_bound(kind, 4096, 64, equal=equal, part=lambda c, k, e=equal: partition(c, k, equal_size=e))
            goals.append(Goal(f"partition 4096/64 {sizes}, {kind}: over the bound", found, 1.001, at_most=True))
    ours = over_bound("lognormal", 512, 64, equal=True, part=lambda c, k: partition(c, k, equal_size=True))
    theirs = over_bound("lognormal", 512, 64, equal=True, part=lambda c, k: differencing_equal(c.tolist(), k))
    goals.append(
        Goal("partition 512/64 equal, lognormal: over the bound", ours, 1.04, at_most=True, note=f"KK {theirs:.3f}")
    )
    goals += speed_goals()
    for n, dp in ((512, 8), (512, 64), (4096, 8), (4096, 64)):
        goals += plan_goals(n, dp)
    return goals


if __name__ == "__main__":
    sys.exit(show(measure(), title="balance"))
