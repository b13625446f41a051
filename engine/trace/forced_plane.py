"""A plane in this process that answers claims with what a log says was claimed, if that is an answer to them.

Invariant: a group is in the plane from its claim on, with its tags and no columns; whatever is
not forced (leases, fences, clears) is LocalPlane's own. Of the log it trusts which groups a claim took,
not how many were asked for.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.data_plane.base import Claim, Lease, Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.deployment import CONSUMER, PARTITION
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.columns import COLUMNS

FOR_EVER_S = float("inf")

OWNER = "replay"
"""Who claims in a replay."""

current_batch: ContextVar[int] = ContextVar("current_batch")
"""The batch for which the running task claims."""


class ForcedPlane(PassingPlane):
    """`expect` says how many claims each batch will have; `allow` lets the next of them through.

    `lost` are rows whose claims were lost before hand-off. A claim finds nothing only where the log lets it: its batch
    has no further claim, and `more_to_come` is false.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        group_size: int,
        more_to_come: Callable[[], bool] = lambda: False,
        lost: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(LocalPlane(clock=clock, lease_s=FOR_EVER_S))
        self._group_size = group_size
        self._expected: Counter[int] = Counter()
        self._more_to_come = more_to_come
        self._allowed: defaultdict[int, deque[tuple[Sequence[GroupMeta], int | None]]] = defaultdict(deque)
        self._complete: set[int] = set()
        self._changed = Signal()
        self._refused = ""
        self._lost = lost

    async def start(self) -> None:
        await self._plane.register(Partition(PARTITION, self._group_size, (), (CONSUMER,)))

    @property
    def refused(self) -> str:
        """Why a claim that was made cannot have had the answer that stands in the log; empty if it can."""
        return self._refused

    @property
    def lost(self) -> frozenset[str]:
        return self._lost

    def expect(self, batch: int) -> None:
        self._expected[batch] += 1

    def allow(self, batch: int, groups: Sequence[GroupMeta], *, asked: int | None) -> None:
        """Let a claim of so many groups through; `asked` is None where the log does not say how many it was for."""
        self._allowed[batch].append((groups, asked))
        self._changed.notify()

    def look(self) -> None:
        """Have claims look again whether something can still come."""
        self._changed.notify()

    def complete(self, batch: int) -> None:
        """Let claims of a batch find nothing, once those that it had are made."""
        self._complete.add(batch)
        self._changed.notify()

    def more_may_come(self) -> bool:
        return not self._nothing_left(current_batch.get())

    async def claim(
        self, partition: str, consumer: str, *, columns: Sequence[str], max_groups: int, owner: str, claim_id: str
    ) -> Claim:
        batch = current_batch.get()
        await self._changed.wait_until(lambda: bool(self._allowed[batch]) or self._nothing_left(batch))
        if not self._allowed[batch]:
            return Claim(claim_id, partition, consumer, owner, 0, ())
        self._expected[batch] -= 1
        groups, asked = self._allowed[batch].popleft()
        request = (partition, consumer, tuple(columns), owner, owner == claim_id.rpartition("/")[0])
        wanted = (PARTITION, CONSUMER, COLUMNS, OWNER, True)
        if request != wanted:
            self._refused = f"the replay claims {request[:4]} as {claim_id}; it should claim {wanted[:4]}"
        elif len(groups) > max_groups or asked not in (None, max_groups):
            of = len(groups) if asked is None else asked
            self._refused = f"a claim of {of} groups in the log, of at most {max_groups} in the replay"
        return await self.put_and_claim(groups, owner=owner, claim_id=claim_id)

    async def put_and_claim(self, groups: Sequence[GroupMeta], *, owner: str, claim_id: str) -> Claim:
        """Put groups and claim exactly them; they come in the order given."""
        for group in groups:
            # The tags that claims are ordered by; the groups themselves are handed out as they were recorded.
            bare = GroupMeta(group.keys, {tag.GROUP: group.group, tag.VERSION: group.version})
            await self._plane.put(PARTITION, bare, {})
        claim = await self._plane.claim(
            PARTITION, CONSUMER, columns=(), max_groups=len(groups), owner=owner, claim_id=claim_id
        )
        return Claim(claim_id, PARTITION, CONSUMER, owner, claim.fence, tuple(groups))

    async def forget(self, groups: Sequence[GroupMeta]) -> None:
        """Take groups out of the plane: they are ready again, and come back with their next claim."""
        await self._plane.clear(PARTITION, [key for group in groups for key in group.keys])

    async def leased(self, lease: Lease) -> frozenset[str]:
        return await self._plane.leased(lease) - self._lost

    def _nothing_left(self, batch: int) -> bool:
        over = batch in self._complete and not self._expected[batch] and not self._allowed[batch]
        return over and not self._more_to_come()
