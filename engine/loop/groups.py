"""The controller's register of groups, and `settle`, the one act that ends a sample.

Invariants: a group is in flight, buffered, claimed or settled, and moves that way only; each of
its samples gets one fate, logged before its key is cleared; its capacity comes back once.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import anyio
import structlog

from asyncrl.engine.checkpoint.state import GrantState, GroupState, Place
from asyncrl.engine.data_plane.base import Claim, DataPlane, Lease
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import (
    Claimed,
    Dispatched,
    Finished,
    GroupFailed,
    Put,
    Released,
    Settled,
    Span,
    digest_written,
    written,
)
from asyncrl.engine.loop.leased_rows import LeasedRows
from asyncrl.engine.loop.run_ahead import RunAhead
from asyncrl.engine.loop.settlement import Settlement, drop_fates
from asyncrl.engine.records import Grant, GroupMeta
from asyncrl.engine.records import group as tag
from asyncrl.engine.records.fate import (
    CANCELLED,
    COLLECTOR_DIED,
    NOT_RESTORED,
    RECALLED,
    RUN_ENDED,
    STALE,
    dropped,
    failed,
)
from asyncrl.engine.records.spans import tokens_by_version

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """How many groups are where, and how much of run-ahead is used."""

    in_flight: int
    buffered: int
    claimed: int
    run_ahead: int
    run_ahead_limit: int


class Groups:
    """Groups that have no fate yet. `changed` tells of every arrival, failure and settlement.

    `on_lost` is called with the grant of a group that got too old, was recalled or died with its collector, and the
    reason.
    """

    def __init__(
        self,
        *,
        plane: DataPlane,
        partition: str,
        consumer: str,
        log: EventLog,
        run_ahead: RunAhead,
        on_lost: Callable[[Grant, str], None] = lambda grant, reason: None,
    ) -> None:
        self._plane = plane
        self._partition = partition
        self._consumer = consumer
        self._log = log
        self.run_ahead = run_ahead
        self._on_lost = on_lost
        self._in_flight: dict[int, Grant] = {}
        self._buffered: dict[int, GroupMeta] = {}
        self._claimed: dict[int, GroupMeta] = {}
        self._leased = LeasedRows(plane, partition, consumer)
        self._grants: dict[int, Grant] = {}
        self._stamps: dict[int, int] = {}
        self._collectors: dict[int, str] = {}
        self._since: dict[int, float] = {}
        self._recalled: set[int] = set()
        self._copied: set[str] = set()
        self._copy_over = anyio.Event()
        self._arrivals = 0
        self.changed = run_ahead.changed

    @property
    def partition(self) -> str:
        return self._partition

    @property
    def consumer(self) -> str:
        return self._consumer

    @property
    def arrivals(self) -> int:
        """How many groups have arrived since the run began."""
        return self._arrivals

    @property
    def any_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def buffered(self) -> int:
        """How many groups are in the data plane and not claimed."""
        return len(self._buffered)

    def statistics(self) -> GroupStatistics:
        run_ahead = self.run_ahead
        return GroupStatistics(
            len(self._in_flight), len(self._buffered), len(self._claimed), run_ahead.used, run_ahead.limit
        )

    def in_flight(self, group: int) -> Grant | None:
        """Return the grant of a group that is on its way; None for any other."""
        return self._in_flight.get(group)

    def versions_in_flight(self) -> list[int]:
        """Return, per group on its way, the oldest version that its stamp can be."""
        return [self._stamps[group] for group in self._in_flight]

    def versions_buffered(self) -> list[int]:
        """Return the stamped version of each group that can be claimed."""
        return [group.version for group in self._buffered.values()]

    def awaited(self) -> str:
        """Say which collectors have groups on their way, and for how long, such as `collector0 has 2 (for 31 s)`."""
        began: dict[str, list[float]] = {}
        for group, since in self._since.items():
            began.setdefault(self._collectors[group], []).append(since)
        said = [f"{name} has {len(all_)} (for {self._log.now - min(all_):.0f} s)" for name, all_ in began.items()]
        return ", ".join(sorted(said)) or "no collector has any"

    def doomed(self, oldest: int) -> dict[str, list[int]]:
        """Return, by collector, the groups on their way that may be older than version `oldest`."""
        out: dict[str, list[int]] = {}
        for group in self._in_flight:
            if self._stamps[group] < oldest:
                out.setdefault(self._collectors[group], []).append(group)
        return out

    def of_collector(self, name: str) -> list[int]:
        """Return the groups on their way from a collector, in order of dispatch."""
        return [group for group in self._in_flight if self._collectors[group] == name]

    def claimed(self, groups: Iterable[int]) -> list[GroupMeta]:
        """Return those of `groups` that are claimed here."""
        return [self._claimed[group] for group in groups if group in self._claimed]

    def take_back(self, groups: Iterable[int]) -> None:
        """Note that claimed groups can be claimed again: their claim was returned, or its owner died."""
        for group in groups:
            self._buffered[group] = self._claimed.pop(group)
            self._arrivals += 1
        self.changed.notify()

    def dispatch(self, grant: Grant, collector: str, *, served: int, retry_of: int | None = None) -> None:
        """Note a group before it is granted; it takes capacity.

        `served` is what the collector is known to serve: the oldest version that its stamp can be.
        """
        self.run_ahead.take(grant.group)
        self._in_flight[grant.group] = grant
        self._grants[grant.group] = grant
        self._stamps[grant.group] = served
        self._collectors[grant.group] = collector
        self._since[grant.group] = self._log.now
        self._log.append(
            Dispatched(
                group=grant.group,
                prompt=grant.prompt.id,
                dataset=grant.prompt.dataset,
                seed=grant.seed,
                size=grant.size,
                collector=collector,
                retry_of=retry_of,
            )
        )

    def arrive(self, group: GroupMeta, *, seconds: float | None = None) -> None:
        """Note that a group is in the data plane; a notice that comes after the claim changes nothing.

        `seconds` is how long it took its collector, if that is known.
        """
        if self._in_flight.pop(group.group, None) is None:
            return
        self._since.pop(group.group, None)
        self._buffered[group.group] = group
        self._arrivals += 1
        by_version = tokens_by_version(group) if tag.RESPONSE_TOKENS in group.tags else {}
        for version, tokens in sorted(by_version.items()):
            self._log.append(Span(group=group.group, version=version, tokens=tokens))
        self._log.append(Finished(group=group.group, tokens=sum(by_version.values()), seconds=seconds))
        tags = written(group.tags)
        self._log.append(Put(group=group.group, keys=list(group.keys), tags=tags, digest=digest_written(tags)))
        self.changed.notify()

    def recall(self, groups: Iterable[int]) -> None:
        """Note that these groups, once cancelled, count as recalled and not as cancelled for their age."""
        self._recalled.update(groups)

    def fail(self, group: int, reason: str, error: str) -> None:
        """Settle a group that ended without a put."""
        grant = self._in_flight.pop(group, None)
        if grant is None:
            return
        self._since.pop(group, None)
        if reason == CANCELLED and group in self._recalled:
            reason = RECALLED
        if reason in (CANCELLED, RECALLED):
            fates = [dropped(reason)] * grant.size
        else:
            self._log.append(GroupFailed(group=group, reason=reason, error=error))
            fates = [failed(reason)] * grant.size
        self._settled(group, fates)
        self.release([group])
        self.changed.notify()

    async def bury(self, collector: str, error: str) -> list[int]:
        """Settle what a dead collector had in flight; return those groups. What it had put whole stays.

        Its put notices may have died with it, so the data plane is asked.
        """
        its = {group for group in self._in_flight if self._collectors[group] == collector}
        if its:
            for group in await self._plane.groups(self._partition):
                if group.group in its:
                    self.arrive(group)
        lost = sorted(its & self._in_flight.keys())
        for number in lost:
            self.fail(number, COLLECTOR_DIED, error)
        return lost

    async def clear_lost(self, groups: Iterable[int]) -> None:
        """Clear groups that came to the data plane after they were settled."""
        lost = set(groups)
        if lost:
            late = [group for group in await self._plane.groups(self._partition) if group.group in lost]
            await self._plane.clear(self._partition, [key for group in late for key in group.keys])

    def claim(self, claim: Claim, *, asked: int | None = None) -> list[GroupMeta]:
        """Note a claim, and return its new groups. A group whose put notice is still on its way counts as arrived.

        The log says how many groups were `asked` for. A group that was claimed here before, and whose lease had ended,
        gets the fencing number of this claim.
        """
        new = []
        for group in claim.groups:
            self.arrive(group)
            if group.group in self._buffered:
                self._claimed[group.group] = self._buffered.pop(group.group)
                new.append(group)
            if group.group in self._claimed:
                self._leased.note(group, claim.fence)
        if new:
            groups = [group.group for group in new]
            self._log.append(Claimed(claim=claim.id, fence=claim.fence, groups=groups, asked=asked))
            self.changed.notify()
        return new

    async def clear_unknown(self, claim: Claim) -> None:
        """Clear groups of a claim that have no place here: another owner had them, and their fates are logged."""
        unknown = [group for group in claim.groups if group.group not in self._claimed]
        if unknown:
            log.warning("claimed groups that have their fates already", groups=[group.group for group in unknown])
            await self._leased.clear(unknown, claim.lease)

    async def renew(self) -> None:
        """Renew the leases of all claimed groups; the hand-off finds those that another owner has taken."""
        await self._leased.renew(list(self._claimed.values()))

    def lease(self, groups: Sequence[GroupMeta]) -> Lease:
        """Return the fencing numbers under which groups were claimed."""
        return self._leased.lease(groups)

    async def settle(self, settlements: Sequence[Settlement], *, release: bool = False) -> None:
        """End claimed groups: log fates, clear keys and, with `release`, give back their capacity.

        Cancellation waits until this is done, at most for the plane's deadline. Keys that another owner has claimed
        meanwhile are left to that owner.
        """
        if not settlements:
            return
        groups = [settlement.group for settlement in settlements]
        for settlement in settlements:
            del self._claimed[settlement.group.group]
            self._settled(settlement.group.group, settlement.fates)
        lease = self._leased.pop(groups)
        # If this were cut off, the capacity of groups that have their fates would never come back.
        with anyio.CancelScope(shield=True):
            if not self._copied.isdisjoint(lease.fences):
                await self._copy_over.wait()  # It ends by the deadline of the checkpoint.
            await self._leased.clear(groups, lease)
        if release:
            self.release([group.group for group in groups])
        self.changed.notify()

    def _settled(self, group: int, fates: Sequence[str]) -> None:
        """Log the fates of a group, and tell of a prompt that may be issued again."""
        grant = self._grants.pop(group)
        del self._stamps[group], self._collectors[group]
        self._log.append(Settled(group=group, fates=list(fates)))
        self._recalled.discard(group)
        for reason in (STALE, CANCELLED, RECALLED, NOT_RESTORED):
            if dropped(reason) in fates:
                self._on_lost(grant, reason)
        if failed(COLLECTOR_DIED) in fates:
            self._on_lost(grant, COLLECTOR_DIED)

    def release(self, groups: Iterable[int]) -> None:
        """Give back the capacity of groups to run-ahead, once per group."""
        freed = self.run_ahead.give_back(groups)
        if freed:
            self._log.append(Released(groups=freed))

    def state(self, judged: Container[int]) -> list[GroupState]:
        """Return the groups without a fate, for `restore`, in order of dispatch.

        What is claimed and not `judged` yet has no batch: it is to be claimed again.
        """

        def of(number: int, group: GroupMeta, place: Place) -> GroupState:
            return GroupState(GrantState.of(self._grants[number]), place, list(group.keys), dict(group.tags))

        held = [of(number, group, "buffered") for number, group in self._buffered.items()]
        for number, group in self._claimed.items():
            held.append(of(number, group, "claimed" if number in judged else "buffered"))
        flying = [GroupState(GrantState.of(grant), "in_flight") for grant in self._in_flight.values()]
        return sorted(held + flying, key=lambda state: state.grant.group)

    def copying(self, groups: Iterable[GroupState]) -> Callable[[], None]:
        """Keep the rows of groups in the data plane, whatever becomes of them, until the function returned is called.

        Their settlement waits for it: what a checkpoint is to hold would otherwise be cleared under its hands.
        """
        self._copied, self._copy_over = {group.meta.row for group in groups}, anyio.Event()

        def over() -> None:
            self._copied = set()
            self._copy_over.set()

        return over

    def restore(
        self, states: Iterable[GroupState], grant: Callable[[GrantState], Grant], *, fence: int, out: Iterable[int]
    ) -> None:
        """Take up the groups of a checkpoint, whose rows are in the data plane again; those claimed, under `fence`.

        A group that was in flight then is `NOT_RESTORED`, and its prompt comes again. `out` are the groups whose
        capacity is out.
        """
        self.run_ahead.restore(out)
        for state in states:
            number = state.grant.group
            self._grants[number] = grant(state.grant)
            self._stamps[number], self._collectors[number] = 0, ""
            if state.place == "in_flight":
                self._in_flight[number] = self._grants[number]
                self.abandon(number)
                continue
            place = self._claimed if state.place == "claimed" else self._buffered
            place[number] = state.meta
            if state.place == "claimed":
                self._leased.note(state.meta, fence)
            else:
                self._arrivals += 1
        self.changed.notify()

    def abandon(self, group: int) -> None:
        """Settle a group that was in flight when the checkpoint was made from which the run goes on."""
        grant = self._in_flight.pop(group)
        self._settled(group, [dropped(NOT_RESTORED)] * grant.size)
        self.release([group])

    async def settle_rest(self) -> None:
        """At the end of a run, drop all groups without a fate (`run_ended`), and clear every key."""
        for grant in self._in_flight.values():
            self._settled(grant.group, [dropped(RUN_ENDED)] * grant.size)
        for group in (*self._buffered.values(), *self._claimed.values()):
            self._settled(group.group, drop_fates(group, RUN_ENDED))
        self._in_flight.clear()
        self._since.clear()
        self._buffered.clear()
        self._claimed.clear()
        self._leased.forget_all()
        # Also the capacity that waits for a batch's end or publish, because neither will come.
        self.release(self.run_ahead.out)
        await self._plane.clear(self._partition, await self._plane.keys(self._partition))
