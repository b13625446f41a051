"""Faults planted in one part each: the invariants catch every one, and pass the same schedule without it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from anyio import CancelScope
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream

from asyncrl.collectors.collector import Collector
from asyncrl.engine.aio.outbox import Outbox
from asyncrl.engine.aio.signal import Signal
from asyncrl.engine.data_plane.base import Claim, Lease
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.loop.batch import Batch, TrainedBatch
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.front_end import FrontEnd
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.loop.leased_rows import LeasedRows
from asyncrl.engine.loop.publisher import Publisher
from asyncrl.engine.loop.settlement import Settlement
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.records import GroupMeta
from asyncrl.engine.records.ending import Ending
from asyncrl.engine.records.keys import sample_keys
from asyncrl.engine.records.message import GroupFailure, Message, PutNotice
from asyncrl.engine.records.work import RankResult, TrainWork
from asyncrl.engine.testing.conformance.schedule import Schedule
from asyncrl.engine.testing.fakes import FakeRank
from asyncrl.engine.weights.base import Offer, Sent

NEVER = 1e6
BUSY = Schedule(
    staleness=2,
    groups=2,
    size=3,
    seconds=(1.0, 0.3, 7.0, 2.0, 1.0),
    rewards=(0.0, 1.0, 0.5),
    slow_publishes=(0.5,),
    epochs=10,
    prompts=8,
    poll_s=NEVER,
)


class LosesWakeUps(Signal):
    """Most notifications wake nobody."""

    told = 0

    def notify(self) -> None:
        self.told += 1
        if self.told % 7 == 0:
            super().notify()


class Deaf(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups.changed.__class__ = LosesWakeUps


class LeakyGroups(Groups):
    """The capacity of every fifth group never comes back."""

    def release(self, groups: Any) -> None:
        super().release([group for group in groups if group % 5])


class Leaky(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups.__class__ = LeakyGroups


class GenerousGroups(Groups):
    """Capacity comes back twice."""

    def release(self, groups: Any) -> None:
        given = list(groups)
        super().release(given)
        self.run_ahead.limit += len(given)


class Generous(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups.__class__ = GenerousGroups


class TwiceGroups(Groups):
    """A group settles, and settles again."""

    def _settled(self, group: int, fates: Sequence[str]) -> None:
        prompt, stamp, collector = self._grants[group], self._stamps[group], self._collectors[group]
        super()._settled(group, fates)
        self._grants[group], self._stamps[group], self._collectors[group] = prompt, stamp, collector
        super()._settled(group, fates)


class SettlesTwice(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups.__class__ = TwiceGroups


class HoardedRows(LeasedRows):
    """Keys of settled groups stay in the plane, claimed for ever."""

    async def clear(self, groups: Sequence[GroupMeta], lease: Lease) -> None:
        return None


class Hoarder(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups._leased.__class__ = HoardedRows


class LaxFrontEnd(FrontEnd):
    """Nothing is ever too old."""

    def _is_stale(self, group: GroupMeta, version: int) -> bool:
        return False


class Lax(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.front_end.__class__ = LaxFrontEnd


class TearingFrontEnd(FrontEnd):
    """One sample of each kept group is trained, the rest is forgotten."""

    async def _judge(self, batch: Batch, groups: Sequence[GroupMeta]) -> None:
        await super()._judge(batch, groups)
        batch.kept = [replace(judgement, trained=judgement.trained[:1]) for judgement in batch.kept]


class Tears(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.front_end.__class__ = TearingFrontEnd


class HastyVersions(Versions):
    """Generators never seem to lag behind."""

    @property
    def publish_lag(self) -> int:
        return 0


class Hasty(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.versions.__class__ = HastyVersions


class PaysEarly(Controller):
    """Capacity comes back when a publish begins, not when it is acknowledged."""

    async def _publish(self, trained: MemoryObjectReceiveStream[TrainedBatch]) -> None:
        async for batch in trained:
            self.core.published(batch.version)
            await self.publisher.publish(batch.version, batch.weights)


class StampsLate(Collector):
    """A group is stamped with the version in force when it is put."""

    async def _rollout(self, granted: Any) -> Any:
        grant = granted.grant
        group, columns, *rest = cast("Sequence[Any]", await super()._rollout(granted))
        late = GroupMeta(
            sample_keys(self._version, grant.group, grant.size),
            {**group.tags, "version": self._version, "end_version": self._version},
        )
        return (late, columns, *rest)


class Boastful(Collector):
    """A version is served before it is loaded, and stays so when it cannot be."""

    async def update_weights(self, version: int, offer: Offer) -> None:
        self.set_weight_version(version)
        await super().update_weights(version, offer)


class Forgetful(Outbox):
    """Some messages of one kind are lost."""

    kind: type[Any] = PutNotice
    every = 3
    heard = 0

    def post(self, message: Message) -> None:
        self.heard += isinstance(message, self.kind)
        if not (isinstance(message, self.kind) and self.heard % self.every == 0):
            super().post(message)


class ForgetsFailures(Forgetful):
    kind = GroupFailure
    every = 1


class LosesPutNotices(Collector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outbox.__class__ = Forgetful


class LosesFailures(Collector):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outbox.__class__ = ForgetsFailures


class CountsFillers(FakeRank):
    """A filler's tokens are trained tokens."""

    async def train(self, work: TrainWork) -> RankResult:
        result = await FakeRank.train(self, work)
        extra = sum(batch.tokens for batch in work.micro_batches if batch.filler)
        return replace(result, tokens=result.tokens + extra)


class SharedClaims(PassingPlane):
    """A plane that leaves what it hands out on the table."""

    async def claim(self, partition: str, consumer: str, **how: Any) -> Claim:
        claim = await self._plane.claim(partition, consumer, **how)
        rows = {group.row: claim.fence for group in claim.groups}
        await self._plane.give_back(Lease(partition, consumer, rows))
        return claim


class LoadsTwice(Collector):
    """A load that was given up goes on, and the next try of its version is another one."""

    async def update_weights(self, version: int, offer: Offer) -> None:
        await self._generator.update_weights(version, await self._transport.receive(offer))
        self.set_weight_version(version)


class CredulousPublisher(Publisher):
    """A generator that is said to serve a version, as all are of version 0, is not asked again."""

    async def _send(self, version: int, sent: Sent, loaded: dict[str, Any], *, again: bool) -> None:
        served = self._versions.served
        if self.tries.setdefault(version, 0):
            loaded.update({name: None for name in served if served[name] >= version})
        self.tries[version] += 1
        await super()._send(version, sent, loaded, again=again)

    tries: dict[int, int]


class Credulous(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.publisher.__class__ = CredulousPublisher
        cast("CredulousPublisher", self.publisher).tries = {}


class HastyFrontEnd(FrontEnd):
    """Whether more can come is asked when a claim's answer is there, not when it was made."""

    async def _claim(self, batch: Batch, wanted: int) -> Sequence[GroupMeta]:
        while True:
            worth = partial(self._worth_claiming, batch, wanted, -1)
            told = await self._groups.changed.wait_at_most(worth, self._settings.poll_s)
            groups = await self._claim_once(wanted, told=told)
            if groups or not self._more_may_come():
                return groups


class EndsEarly(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.front_end.__class__ = HastyFrontEnd


class TornGroups(Groups):
    """A settlement is two acts, and whoever is cancelled between them does the first alone."""

    async def settle(self, settlements: Sequence[Settlement], *, release: bool = False) -> None:
        await super().settle(settlements)
        await checkpoint()
        if release:
            self.release([settlement.group.group for settlement in settlements])


class CutShort(Controller):
    """An interruption cancels whatever the front end is about."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups.__class__ = TornGroups
        self.scope = CancelScope()

    def interrupt(self, ending: Ending | None = None) -> None:
        super().interrupt(ending)
        self.scope.cancel()

    async def _assemble(self) -> None:
        with self.scope:
            await super()._assemble()


HURRIED = replace(
    BUSY, seconds=(7.0, 7.0, 11.0, 11.0), rewards=(0.0, 1.0), plane_answers=(0.0, 3.0, 0.0), epochs=1, poll_s=5.0
)
CUT = replace(
    BUSY,
    refill="wait",
    seconds=(0.3, 0.3, 2.5, 0.3, 2.5),
    step_seconds=(30.0,),
    rewards=(0.0, 0.0, 0.0, 0.0, 1.0, 0.5),
    plane_answers=(0.0, 2.0, 0.0),
    interrupt_at=6.8,
)
ONE_SAMPLE = replace(BUSY, groups=1, size=2, ranks=2, rewards=(0.0, 1.0), lengths=(7,))

FAULTS: dict[str, tuple[Schedule, dict[str, Any], str]] = {
    "a lost wake-up": (BUSY, {"controller": Deaf}, "granted at|waited from|ended with|took"),
    "a leaked budget slot": (BUSY, {"controller": Leaky}, "was due at"),
    "capacity returned twice": (BUSY, {"controller": Generous}, "groups were out"),
    "capacity returned before the publish": (BUSY, {"controller": PaysEarly}, "before"),
    "a double settle": (BUSY, {"controller": SettlesTwice}, "settled twice"),
    "a claim not released": (BUSY, {"controller": Hoarder}, "never cleared"),
    "a claim that two share": (BUSY, {"wrap": SharedClaims}, "handed out"),
    "a stale group let through": (
        replace(BUSY, seconds=(1.0, 0.3, 1.0, 1.0, 1.0, 1.0, 9.0)),
        {"controller": Lax},
        "let through",
    ),
    # Of a group that loses samples before its step, the step itself tells first.
    "a torn group": (BUSY, {"controller": Tears}, "was split|neither trained, masked nor failed"),
    "a step ahead of its publish": (
        replace(BUSY, slow_publishes=(6.0,), step_seconds=(0.1,)),
        {"controller": Hasty},
        "versions ahead",
    ),
    "a version stamped late": (BUSY, {"collector": StampsLate}, "served later"),
    "a version served before it is loaded": (
        replace(BUSY, bad_publishes=frozenset({3, 4, 5})),
        {"collector": Boastful},
        "before it is loaded",
    ),
    "a lost put notice without a slow poll": (BUSY, {"collector": LosesPutNotices}, "noticed at|ended with"),
    "a lost failure": (
        replace(BUSY, failing_calls=(False, False, True)),
        {"collector": LosesFailures},
        "nothing was heard",
    ),
    "a load that is not joined": (
        replace(BUSY, slow_publishes=(0.5, 0.5, 0.5, 30.0)),
        {"collector": LoadsTwice},
        "while 2 is under way|while 3 is under way",
    ),
    "a version 0 that nobody loaded": (
        replace(BUSY, bad_publishes=frozenset({0})),
        {"controller": Credulous},
        "before it is loaded|without being loaded",
    ),
    "data that ends while a claim is on its way": (HURRIED, {"controller": EndsEarly}, "were not judged"),
    "a settlement that is cut in two": (CUT, {"controller": CutShort}, "was due at"),
    "a filler that counts": (
        replace(ONE_SAMPLE, ranks=3),
        {"rank": CountsFillers},
        "the ranks trained on",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_named(fault: str) -> None:
    """The schedule is sound; with the fault the invariants say what is wrong with it."""
    schedule, planted, said = FAULTS[fault]
    assert schedule.run().violations == []
    found = schedule.run(**planted).violations
    assert any(words in violation for violation in found for words in said.split("|")), found


def test_every_fault_is_another_one() -> None:
    """At least ten, and none planted twice."""
    kinds: set[Callable[..., Any]] = {part for _, planted, _ in FAULTS.values() for part in planted.values()}
    assert len(FAULTS) == len(kinds) >= 10
