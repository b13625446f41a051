"""The driver's plan: samples to micro-batches under a token budget, micro-batches to ranks.

Pure functions over keys and lengths. Invariants: every rank gets the same number of
micro-batches; none is over the budget; each key is planned once; the plan does not depend on
the order in which keys arrived (ties go by key).
"""

from collections.abc import Mapping, Sequence

from asyncrl.engine.records import MicroBatch, Plan


def over_budget(lengths: Mapping[str, int], budget_tokens: int) -> list[str]:
    """Return the keys whose sample alone is over the budget."""
    return sorted(key for key, tokens in lengths.items() if tokens > budget_tokens)


def plan_batch(lengths: Mapping[str, int], *, ranks: int, budget_tokens: int) -> Plan:
    """Pack samples (key to tokens) into micro-batches and those onto `ranks`.

    Longest first into the emptiest of m bins, for the smallest multiple m of `ranks` that works;
    bins stay whole and go, heaviest first, to the lightest rank that has room for one more. Bins
    without a sample become fillers that repeat the shortest sample with weight zero. ValueError
    for no samples, or one over the budget.
    """
    if not lengths:
        raise ValueError("nothing to plan: the batch has no samples")
    too_long = over_budget(lengths, budget_tokens)
    if too_long:
        raise ValueError(f"{too_long[0]} has {lengths[too_long[0]]} tokens, over the budget of {budget_tokens}")
    order = sorted(lengths, key=lambda key: (-lengths[key], key))
    lower_bound = -(-sum(lengths.values()) // budget_tokens)
    count = ranks * max(1, -(-lower_bound // ranks))
    while (bins := _pack(order, lengths, count, budget_tokens)) is None:
        count += ranks
    shortest = order[-1]
    batches = [
        MicroBatch(tuple(keys), sum(lengths[key] for key in keys))
        if keys
        else MicroBatch((shortest,), lengths[shortest], filler=True)
        for keys in bins
    ]
    return Plan(_deal(batches, ranks))


def _pack(order: Sequence[str], lengths: Mapping[str, int], count: int, budget_tokens: int) -> list[list[str]] | None:
    """Longest first into the emptiest bin; None if a sample does not fit even there."""
    bins: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for key in order:
        at = loads.index(min(loads))
        if loads[at] + lengths[key] > budget_tokens:
            return None
        bins[at].append(key)
        loads[at] += lengths[key]
    return bins


def _deal(batches: Sequence[MicroBatch], ranks: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Give each rank equally many micro-batches, heaviest first to the lightest rank with room."""
    each = len(batches) // ranks
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    weights = {id(batch): 0 if batch.filler else batch.tokens for batch in batches}
    for batch in sorted(batches, key=lambda b: (-weights[id(b)], b.filler, b.keys)):
        open_ranks = [rank for rank in range(ranks) if len(hands[rank]) < each]
        rank = min(open_ranks, key=lambda r: (loads[r], r))
        hands[rank].append(batch)
        loads[rank] += weights[id(batch)]
    return tuple(tuple(hand) for hand in hands)
