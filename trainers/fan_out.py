"""The driver's plan: samples to micro-batches under a token budget, micro-batches to ranks.

Pure functions over keys and lengths. Invariants: every rank gets the same number of
micro-batches (in lockstep); none is over the budget; each key is planned once; the plan does not
depend on the order in which keys arrived (ties go by key).
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.trainers.planning.layouts import by_locality, in_lockstep, in_order, rank_by_rank, split_updates
from asyncrl.trainers.planning.nearness import Near, nearer
from asyncrl.trainers.planning.samples import Floats, Ints, Layout, Samples, loads_of, stable_order

Cost = Callable[[Ints], Floats] | Mapping[str, float]
"""The cost of samples: a function of an array of their padded tokens, or a number per key."""
Order = Literal["costliest_first", "cheap_ends"]


def over_budget(lengths: Mapping[str, int], budget_tokens: int, *, align: int = 1) -> list[str]:
    """Return the keys of the samples that, padded to a multiple of `align`, are over the budget by themselves."""
    longest = budget_tokens // align * align
    return sorted(key for key, tokens in lengths.items() if tokens > longest)


def plan_batch(
    lengths: Mapping[str, int],
    *,
    ranks: int,
    budget_tokens: int,
    cost: Cost | None = None,
    align: int = 1,
    groups: Mapping[str, str] | None = None,
    tolerance: float = 0.0005,
    updates: int = 1,
    forward_only: bool = False,
    balance: bool = True,
    order: Order = "costliest_first",
    near: Near | None = None,
) -> Plan:
    """Pack samples (key to tokens) into micro-batches and those onto `ranks`.

    The number of micro-batches is the smallest multiple of `ranks` that holds the samples. Ranks are balanced by
    `cost` (default: padded tokens). Bins without a sample become fillers, which repeat the shortest sample with weight
    zero. ValueError if there are no samples, or if one is over the budget.

    Worst and best fit pack; longest-first assignment and swaps balance; subset sums fill nearly full batches;
    Karmarkar-Karp differencing balances few samples; groups are laid end to end and cut. `trainers/planning/` has a
    file for each, which says what figure it buys. Example: lengths 9, 8, 7, 2, 1 on two ranks with a budget of 12
    make two micro-batches per rank, 12 tokens (9; 2 and 1) against 15 (8; 7), the most even there is.

        align: each sample takes a multiple of this many tokens of the budget (tensor and context parallelism).
        groups: key to group. A group's samples go to one rank or two, if that takes no more micro-batches and no
        rank's cost is over the mean by more than `tolerance`, or over that of the heaviest rank of a plan without
        groups. updates: optimizer updates of the batch, each planned, balanced and filled by itself, with nearly
        equal numbers of samples (fewer updates if there are fewer samples). forward_only: for a stage without an
        update; ranks may differ in micro-batches, and there are no fillers. balance: false keeps the mapping's order,
        with neighbours together, so the plan depends on it. order: the order of a rank's micro-batches. Costliest
        first: ranks compute micro-batches of similar cost at any time. Cheap ends: cheap ones come first and last,
        where a pipeline of p stages fills and drains and idles (p - 1) times the time of the micro-batches there (D.
        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
        section 2.2). near: the nodes of ranks and rows. Ranks get samples whose rows are on their nodes, where no rank
        becomes heavier than the heaviest without, and no micro-batch more is needed; not without `balance`.
    """
    if not lengths:
        raise ValueError("nothing to plan: the batch has no samples")
    for name, value in {"ranks": ranks, "budget_tokens": budget_tokens, "align": align, "updates": updates}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if order not in get_args(Order):
        raise ValueError(f"order is {order!r}; it must be one of {', '.join(get_args(Order))}")
    if updates > 1 and forward_only:
        raise ValueError(f"updates is {updates}; a forward-only plan updates nothing, so it takes 1")
    samples = _samples(lengths, cost=cost, align=align, groups=groups if balance else None, ordered=balance)
    seats = near.seats(ranks) if near is not None else None
    if near is not None:
        samples = replace(samples, homes=near.homes(samples.keys.tolist()))
    capacity = budget_tokens // align
    if int(samples.sizes.max()) > capacity:
        raise ValueError(_too_long(lengths, budget_tokens, align))
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    counts = []
    for part in split_updates(samples, updates, balance=balance):
        if balance:
            layout = _even(part, ranks=ranks, capacity=capacity, tolerance=tolerance, seats=seats, forward=forward_only)
        else:
            layout = in_order(part, ranks=ranks, capacity=capacity, lockstep=not forward_only)
        batches = _batches(part, layout)
        place = _places(layout, batches, order=order if balance else None)
        for rank, index in zip(layout.ranks[place].tolist(), place.tolist(), strict=True):
            hands[rank].append(batches[index])
        counts.append(len(batches) // ranks)
    return Plan(tuple(map(tuple, hands)), not forward_only, tuple(counts) if len(counts) > 1 else ())


def _even(part: Samples, *, ranks: int, capacity: int, tolerance: float, seats: Ints | None, forward: bool) -> Layout:
    """Lay out one update, or a forward stage, with ranks as even as can be, and near to rows where that is free."""

    def lay_out(tolerance: float, seats: Ints | None) -> Layout:
        if forward:
            return rank_by_rank(part, ranks=ranks, capacity=capacity, tolerance=tolerance, seats=seats)
        if part.groups is not None:
            return by_locality(part, part.groups, ranks=ranks, capacity=capacity, tolerance=tolerance, seats=seats)
        return in_lockstep(part, ranks=ranks, capacity=capacity)

    plain = lay_out(tolerance, None)
    if seats is None:
        return plain
    mean = float(part.costs.sum()) / ranks
    heaviest = plain.max_load(part) / mean - 1 if mean else 0.0
    return nearer(plain, lay_out(heaviest, seats), part, seats)


def _too_long(lengths: Mapping[str, int], budget_tokens: int, align: int) -> str:
    key = over_budget(lengths, budget_tokens, align=align)[0]
    padded = f" (in multiples of {align})" if align > 1 else ""
    return f"{key} has {lengths[key]} tokens, over the budget of {budget_tokens}{padded}"


def _samples(
    lengths: Mapping[str, int], *, cost: Cost | None, align: int, groups: Mapping[str, str] | None, ordered: bool
) -> Samples:
    """Return the samples in order of keys, or as they came."""
    keys = list(lengths)
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__)) if ordered else np.arange(len(keys))
    tokens = np.fromiter(lengths.values(), np.int64, len(keys))[order]
    units = -(-tokens // align)
    if cost is None:
        costs = (units * align).astype(np.float64)
    elif isinstance(cost, Mapping):
        costs = np.array([cost[key] for key in keys], np.float64)[order]
    else:
        costs = np.asarray(cost(units * align), np.float64)
    sorted_keys = np.array(keys, dtype=object)[order]
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        worst = sorted_keys[int(np.argmax(~(np.isfinite(costs) & (costs >= 0))))]
        raise ValueError(f"the cost of {worst} is not a finite number of at least 0")
    group = None if groups is None else _numbered(map(groups.__getitem__, keys), len(keys))[order]
    return Samples(sorted_keys, tokens, units, costs, group)


def _numbered(names: Iterable[str], count: int) -> Ints:
    number = defaultdict[str, int](itertools.count().__next__)
    return np.fromiter(map(number.__getitem__, names), np.int64, count)


def _batches(samples: Samples, layout: Layout) -> list[MicroBatch]:
    """Return the micro-batch of each bin, its keys in order."""
    count = len(layout.ranks)
    by_bin = stable_order(layout.bins)
    names = tuple(samples.keys[by_bin].tolist())
    tokens = np.bincount(layout.bins, weights=samples.tokens, minlength=count).astype(np.int64).tolist()
    costs = loads_of(layout.bins, samples.costs, count=count).tolist()
    ends = np.bincount(layout.bins, minlength=count).cumsum().tolist()
    at = samples.shortest
    filler = MicroBatch((samples.keys[at],), int(samples.tokens[at]), True, float(samples.costs[at]))
    return [
        MicroBatch(names[start:end], total, False, cost) if end > start else filler
        for (start, end), total, cost in zip(itertools.pairwise([0, *ends]), tokens, costs, strict=True)
    ]


def _places(layout: Layout, batches: list[MicroBatch], *, order: Order | None) -> Ints:
    """Return the bins in the order in which they go to their ranks; `order` None: unchanged, fillers last."""
    if order is None:
        return np.arange(len(batches))
    costs = np.array([0.0 if batch.filler else batch.cost for batch in batches])
    first = np.full(len(batches), len(layout.bins))
    index = np.arange(len(layout.bins))[::-1]
    first[layout.bins[index]] = index
    costliest = np.lexsort((first, -costs))
    if order == "costliest_first":
        return costliest
    by_rank = costliest[np.argsort(layout.ranks[costliest], kind="stable")]
    members = np.bincount(layout.ranks)
    ends = members.cumsum()
    parts = [by_rank[end - n : end] for end, n in zip(ends.tolist(), members.tolist(), strict=True)]
    return np.concatenate([np.concatenate([part[::2][::-1], part[1::2]]) for part in parts])
