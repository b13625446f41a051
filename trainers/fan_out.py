"""The driver's plan: samples to micro-batches under a token budget, micro-batches to ranks.

Pure functions over keys and lengths. Invariants: every rank gets the same number of
micro-batches (in lockstep); none is over the budget; each key is planned once; the plan does not
depend on the order in which keys arrived (ties go by key).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.trainers.dealing import (
    CLOSE_BY_BINS,
    FEW,
    Floats,
    Ints,
    attainable,
    deal,
    swap_bins,
    swap_freely,
    swap_samples,
    totals,
)
from asyncrl.trainers.locality import gather_groups
from asyncrl.trainers.packing import pack, pack_in_order, pack_into

Cost = Callable[[Ints], Floats] | Mapping[str, float]
"""What samples cost: a function of an array of their tokens (padded), or a number for each key."""
Order = Literal["costliest_first", "cheap_ends"]


@dataclass(frozen=True, slots=True)
class Samples:
    """What one optimizer update plans, in order of keys. `units` are padded tokens over the alignment."""

    keys: list[str]
    tokens: Ints
    units: Ints
    costs: Floats

    def part(self, which: Ints) -> "Samples":
        keys = [self.keys[index] for index in which.tolist()]
        return Samples(keys, self.tokens[which], self.units[which], self.costs[which])

    @property
    def shortest(self) -> int:
        """The last by key of the shortest: what fillers repeat."""
        return len(self.units) - 1 - int(self.units[::-1].argmin())


@dataclass(frozen=True, slots=True)
class Layout:
    """Each sample's bin and each bin's rank. A bin without a sample is a filler."""

    bins: Ints
    ranks: Ints


def over_budget(lengths: Mapping[str, int], budget_tokens: int, *, align: int = 1) -> list[str]:
    """Return the keys whose sample alone, padded to a multiple of `align`, is over the budget."""
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
    tolerance: float = 0.002,
    updates: int = 1,
    lockstep: bool = True,
    balance: bool = True,
    order: Order = "costliest_first",
) -> Plan:
    """Pack samples (key to tokens) into micro-batches and those onto `ranks`.

    Micro-batches are as few as hold the samples, in a multiple of `ranks`; ranks are evened out by
    `cost` (default: padded tokens). Bins without a sample become fillers that repeat the shortest
    sample with weight zero. ValueError for no samples, or one over the budget.

    align: each sample takes a multiple of this many tokens of the budget (tensor and context parallelism).
    groups: key to group; a group's samples go to one rank where no rank's cost exceeds for it the
        heaviest rank's, or the mean by more than `tolerance`.
    updates: optimizer updates of the batch, each planned, balanced and filled by itself, with nearly
        equal numbers of samples (fewer updates if there are fewer samples).
    lockstep: false for a forward-only stage: ranks may differ in micro-batches, and none is a filler.
    balance: false keeps the mapping's order, neighbours together, so that the plan depends on it.
    order: of a rank's micro-batches: costliest first, so that all ranks compute alike at any time; or
        cheap ones at both ends, where a pipeline fills and drains.
    """
    if not lengths:
        raise ValueError("nothing to plan: the batch has no samples")
    if updates > 1 and not lockstep:
        raise ValueError(f"updates is {updates}; a plan without lockstep is forward only and updates nothing")
    samples = _samples(lengths, cost=cost, align=align, ordered=balance)
    capacity = budget_tokens // align
    if int(samples.units.max()) > capacity:
        raise ValueError(_too_long(lengths, budget_tokens, align))
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    counts = []
    for part in _parts(samples, updates, balance=balance):
        if not balance:
            layout = _in_order(part, ranks=ranks, capacity=capacity, lockstep=lockstep)
        elif lockstep:
            layout = _in_lockstep(part, ranks=ranks, capacity=capacity)
        else:
            layout = _rank_by_rank(part, ranks=ranks, capacity=capacity)
        if groups is not None and balance:
            layout = _gathered(layout, part, groups, capacity=capacity, tolerance=tolerance)
        batches = _batches(part, layout)
        place = _places(layout, batches, order=order if balance else None)
        for index in place.tolist():
            hands[layout.ranks[index]].append(batches[index])
        counts.append(len(batches) // ranks)
    return Plan(tuple(map(tuple, hands)), lockstep, tuple(counts) if len(counts) > 1 else ())


def _too_long(lengths: Mapping[str, int], budget_tokens: int, align: int) -> str:
    key = over_budget(lengths, budget_tokens, align=align)[0]
    padded = f" (in multiples of {align})" if align > 1 else ""
    return f"{key} has {lengths[key]} tokens, over the budget of {budget_tokens}{padded}"


def _samples(lengths: Mapping[str, int], *, cost: Cost | None, align: int, ordered: bool) -> Samples:
    keys = sorted(lengths) if ordered else list(lengths)
    tokens = np.array([lengths[key] for key in keys], np.int64)
    units = -(-tokens // align)
    if cost is None:
        costs = (units * align).astype(np.float64)
    elif isinstance(cost, Mapping):
        costs = np.array([cost[key] for key in keys], np.float64)
    else:
        costs = np.asarray(cost(units * align), np.float64)
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        worst = keys[int(np.argmax(~(np.isfinite(costs) & (costs >= 0))))]
        raise ValueError(f"the cost of {worst} is not a finite number of at least 0")
    return Samples(keys, tokens, units, costs)


def _parts(samples: Samples, updates: int, *, balance: bool) -> list[Samples]:
    """Split the samples into optimizer updates of nearly equal numbers and costs."""
    count = min(updates, len(samples.keys))
    if count < 2:
        return [samples]
    if not balance:
        return [samples.part(which) for which in np.array_split(np.arange(len(samples.keys)), count)]
    update = _deal_samples(samples.costs, count)
    return [samples.part(np.flatnonzero(update == index)) for index in range(count)]


def _deal_samples(costs: Floats, hands: int) -> Ints:
    """Deal samples to ranks or updates: numbers differ by one at most, costs hardly."""
    padded = np.concatenate([costs, np.zeros(-len(costs) % hands)])
    return swap_bins(deal(padded, ranks=hands), padded, ranks=hands)[: len(costs)]


def _in_lockstep(samples: Samples, *, ranks: int, capacity: int) -> Layout:
    longest_first = np.argsort(-samples.units, kind="stable")
    bins = np.empty_like(longest_first)
    bins[longest_first], count = pack(samples.units[longest_first], capacity=capacity, multiple=ranks)
    costs = totals(bins, samples.costs, hands=count)
    costs[np.bincount(bins, minlength=count) == 0] = samples.costs[samples.shortest]
    rank = deal(costs, ranks=ranks)
    if count >= len(bins):
        return Layout(bins, swap_bins(rank, costs, ranks=ranks))
    rank = swap_bins(rank, costs, ranks=ranks, close=CLOSE_BY_BINS, rounds=6)
    loads = totals(rank, costs, hands=ranks)
    bins = swap_samples(bins, rank, sizes=samples.units, costs=samples.costs, capacity=capacity, loads=loads)
    layout = Layout(bins, rank)
    heaviest = _heaviest(samples, layout, ranks)
    if len(bins) > FEW or heaviest <= attainable(samples.costs, ranks=ranks, each=count // ranks):
        return layout
    other = _balanced_first(samples, ranks=ranks, capacity=capacity, each=count // ranks)
    return layout if other is None or _heaviest(samples, other, ranks) >= heaviest else other


def _heaviest(samples: Samples, layout: Layout, ranks: int) -> float:
    return float(totals(layout.ranks[layout.bins], samples.costs, hands=ranks).max())


def _balanced_first(samples: Samples, *, ranks: int, capacity: int, each: int) -> Layout | None:
    """Balance samples over ranks and then pack each rank's into `each` micro-batches, if they fit."""
    longest_first = np.argsort(-samples.units, kind="stable")
    rank = swap_freely(_deal_samples(samples.costs, ranks), samples.costs, hands=ranks)
    bins = np.empty_like(longest_first)
    for index in range(ranks):
        mine = longest_first[rank[longest_first] == index]
        some = pack_into(samples.units[mine], each, capacity=capacity) if len(mine) >= each else None
        if some is None:
            return None
        bins[mine] = some + index * each
    return Layout(bins, np.repeat(np.arange(ranks), each))


def _rank_by_rank(samples: Samples, *, ranks: int, capacity: int) -> Layout:
    """Balance samples over ranks, whatever the micro-batches; then pack each rank's by themselves."""
    rank = swap_freely(_deal_samples(samples.costs, ranks), samples.costs, hands=ranks)
    longest_first = np.argsort(-samples.units, kind="stable")
    bins = np.empty_like(longest_first)
    of_bins: list[int] = []
    for index in range(ranks):
        mine = longest_first[rank[longest_first] == index]
        if len(mine):
            some, count = pack(samples.units[mine], capacity=capacity, multiple=1)
            bins[mine] = some + len(of_bins)
            of_bins += [index] * count
    return Layout(bins, np.array(of_bins))


def _gathered(
    layout: Layout, samples: Samples, groups: Mapping[str, str], *, capacity: int, tolerance: float
) -> Layout:
    names = [groups[key] for key in samples.keys]
    args = (layout.bins, layout.ranks, names)
    bins = gather_groups(*args, sizes=samples.units, costs=samples.costs, capacity=capacity, tolerance=tolerance)
    return Layout(bins, layout.ranks)


def _in_order(samples: Samples, *, ranks: int, capacity: int, lockstep: bool) -> Layout:
    bins, count = pack_in_order(samples.units, capacity=capacity, multiple=ranks if lockstep else 1)
    return Layout(bins, np.arange(count) * ranks // count)


def _batches(samples: Samples, layout: Layout) -> list[MicroBatch]:
    """Return the micro-batch of each bin, its keys in order."""
    count = len(layout.ranks)
    by_bin = np.argsort(layout.bins, kind="stable")
    names = np.array(samples.keys, dtype=object)[by_bin].tolist()
    tokens = np.bincount(layout.bins, weights=samples.tokens, minlength=count).astype(np.int64).tolist()
    costs = np.bincount(layout.bins, weights=samples.costs, minlength=count).tolist()
    ends = np.bincount(layout.bins, minlength=count).cumsum().tolist()
    at = samples.shortest
    filler = MicroBatch((samples.keys[at],), int(samples.tokens[at]), True, float(samples.costs[at]))
    return [
        MicroBatch(tuple(names[start:end]), total, False, cost) if end > start else filler
        for (start, end), total, cost in zip(pairwise([0, *ends]), tokens, costs, strict=True)
    ]


def _places(layout: Layout, batches: list[MicroBatch], *, order: Order | None) -> Ints:
    """Return the bins in the order in which they go to their ranks; None: as they are, fillers last."""
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
