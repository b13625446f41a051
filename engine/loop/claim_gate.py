"""Whether a batch may be claimed now, in mode `gate`: so that no later group gets too old.

Batches take the oldest groups first, and the last chance of a group is a deadline. So this is scheduling by earliest
deadline first: of the groups that a batch leaves, those due within the next n batches must fit into n batches.
"""

from collections import Counter
from collections.abc import Iterable


def can_claim_without_expiring(
    *, arrived: Iterable[int], in_flight: Iterable[int], wanted: int, per_batch: int, at: int, bound: int
) -> bool:
    """Return whether a batch trained at version `at` may take the `wanted` oldest of `arrived` now.

    `arrived` and `in_flight` are the oldest versions of the groups there and of those on their way. The answer is True
    if all groups that it leaves can be trained within `bound` by batches of `per_batch`. It is also True if no group in
    flight is older than those it takes, because waiting would change nothing.

    Example, at 2 groups per batch, version 4 and bound 2: groups stamped 4 and 4 have arrived. While two stamped 2 are
    on their way, the answer is False: this batch is their last chance, since the next is trained at version 5. If
    the two were stamped 3, the answer would be True: the next batch can have them.
    """
    waiting, left = Counter(arrived), Counter(in_flight)
    oldest_in_flight = min(left, default=None)
    newest_taken = None
    room = wanted
    for version in sorted(waiting):
        taken = min(room, waiting[version])
        room -= taken
        newest_taken = version if taken else newest_taken
        left[version] += waiting[version] - taken
    if oldest_in_flight is None or (room == 0 and newest_taken is not None and newest_taken <= oldest_in_flight):
        return True
    due = 0
    for version in sorted(left):
        due += left[version]
        if due > max(0, version + bound - at) * per_batch:
            return False
    return True
