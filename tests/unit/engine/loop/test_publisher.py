"""The publisher: a version counts when it is acknowledged, and the dead are not asked twice."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.deployment import WeightSource
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.events.types import AnyEvent, Published, PublishFailed, PublishStarted
from asyncrl.engine.loop.collectors import Collectors
from asyncrl.engine.loop.publisher import Publisher
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.testing.fakes import HANG_S
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.weights.base import Loaded, Offer, Sent
from asyncrl.engine.weights.stand_in import NoWeights


class Events:
    """A fold that keeps every event."""

    kinds = AnyEvent.__args__

    def __init__(self) -> None:
        self.seen: list[AnyEvent] = []

    def apply(self, event: AnyEvent) -> None:
        self.seen.append(event)


class Generator:
    """Takes weights at once, after `refusals`, or is dead; counts how often it was asked.

    `hangs`: the first time it waits for weights that do not come. `takes` is what it says of a load.
    """

    def __init__(
        self,
        name: str = "generator",
        *,
        dead: bool = False,
        refusals: int = 0,
        hangs: bool = False,
        takes: Loaded | None = None,
    ) -> None:
        self.name = name
        self.dead = dead
        self.refusals = refusals
        self.hangs = hangs
        self.takes = takes
        self.asked = 0

    async def update_weights(self, version: int, offer: Offer) -> Loaded | None:
        self.asked += 1
        if self.hangs and self.asked == 1:
            await anyio.sleep(HANG_S)
        if self.dead:
            raise ActorDied("generator died", actor=self.name)
        if self.asked <= self.refusals:
            await anyio.sleep(0.1)
            raise OSError("not yet")
        return self.takes


class Source(NoWeights):
    """Meets the receivers to bring them weights; the n-th time (from 1) fails or hangs, as told."""

    def __init__(self, *, fails: int = 0, hangs: int = 0) -> None:
        self.fails = fails
        self.hangs = hangs
        self.offers: list[tuple[list[str], bool]] = []

    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        self.offers.append((list(receivers), again))
        return Offer({}, meets=True)

    async def serve(self, offer: Offer) -> None:
        await anyio.sleep(HANG_S if len(self.offers) == self.hangs else 0.1)
        if len(self.offers) == self.fails:
            raise Overdue("nobody came")


def publishing(
    body: Callable[[Publisher, Versions], Awaitable[None]], *generators: Generator, source: WeightSource | None = None
) -> list[AnyEvent]:
    """Run `body` on a publisher to generators, with the trainer at version 1; return the events of the log."""
    events = Events()

    async def main() -> None:
        versions = Versions([generator.name for generator in generators])
        versions.advance()
        log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[events])
        trainer = simulated_config(trainer__publish_tries=3).trainer
        handles: Any = generators
        collectors = Collectors(handles)
        publisher = Publisher(
            trainer, collectors, source or NoWeights(), versions=versions, events=log, clock=virtual_clock
        )
        await body(publisher, versions)

    run_virtual(main)
    return events.seen


def test_a_publish_ends_with_its_acknowledgement_and_not_with_the_call() -> None:
    async def body(publisher: Publisher, versions: Versions) -> None:
        async def acknowledge() -> None:
            await anyio.sleep(5.0)
            versions.acknowledge("generator", 1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acknowledge)
            await publisher.publish(1, Sent({}))
            assert virtual_clock() >= 5.0
            assert versions.published == 1

    publishing(body, Generator())


def test_a_dead_generator_is_asked_once_and_not_waited_for_when_it_is_let_go() -> None:
    dead = Generator(dead=True)

    async def body(publisher: Publisher, versions: Versions) -> None:
        async def let_go() -> None:
            await anyio.sleep(5.0)
            versions.leave("generator")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_go)
            await publisher.publish(1, Sent({}))
        assert (dead.asked, virtual_clock()) == (1, 5.0)

    publishing(body, dead)


class Dies(Source):
    async def offer(self, sent: Sent, receivers: Sequence[str], *, again: bool = False) -> Offer:
        await super().offer(sent, receivers, again=again)
        raise ActorDied("rank0 died", actor="rank0")


def test_a_rank_that_dies_is_asked_once() -> None:
    source = Dies()

    async def body(publisher: Publisher, versions: Versions) -> None:
        with pytest.raises(ActorDied, match="rank0"):
            await publisher.publish(1, Sent({}))

    publishing(body, Generator(), source=source)
    assert len(source.offers) == 1


class Hangs(Generator):
    async def update_weights(self, version: int, offer: Offer) -> Loaded | None:
        await anyio.sleep(HANG_S)
        return None


def test_a_call_to_a_process_that_hangs_ends_when_it_is_let_go() -> None:
    async def main() -> None:
        handles: Any = [Hangs("generator")]
        collectors = Collectors(handles)
        member = collectors["generator"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.update_weights, 1, Offer({}))
            await anyio.sleep(5.0)
            collectors.remove("generator")
        assert (virtual_clock(), member.is_reachable, list(collectors)) == (5.0, False, [])

    run_virtual(main)


def test_who_joins_gets_what_was_published_last_as_a_whole() -> None:
    """As a new try, so that no transport sends it changes alone."""
    source = Source()

    async def body(publisher: Publisher, versions: Versions) -> None:
        versions.leave("generator")
        await publisher.publish(1, Sent({}))
        handles: Any = [Generator("another")]
        member = Collectors(handles).add(handles[0])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.catch_up, member)
            await anyio.sleep(1.0)
            assert not member.joined
            versions.acknowledge("another", 1)
        assert (member.joined, versions.published) == (True, 1)
        assert source.offers == [(["generator"], False), (["another"], True)]

    publishing(body, Generator(), source=source)


def test_weights_that_are_loaded_and_never_acknowledged_are_not_published() -> None:
    async def body(publisher: Publisher, versions: Versions) -> None:
        with pytest.raises(Overdue, match=r"version 1 was not published within .*: generator did not acknowledge it"):
            await publisher.publish(1, Sent({}))
        assert versions.published == 0

    publishing(body, Generator())


def test_a_second_try_asks_those_alone_that_have_not_loaded() -> None:
    quick, late = Generator("quick"), Generator("late", refusals=1)

    async def body(publisher: Publisher, versions: Versions) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.publish, 1, Sent({}))
            await anyio.sleep(1.0)
            for generator in (quick, late):
                versions.acknowledge(generator.name, 1)
        assert (quick.asked, late.asked) == (1, 2)

    publishing(body, quick, late)


@pytest.mark.parametrize("wrong", [{"fails": 1}, {"hangs": 1}])
def test_weights_that_do_not_leave_the_trainer_are_offered_again_to_those_that_lack_them(wrong: dict[str, int]) -> None:
    """A broadcast that fails or hangs ends its try within publish_timeout_s; what serves is as it was."""
    quick, late = Generator("quick"), Generator("late", hangs=True)
    source = Source(**wrong)

    async def body(publisher: Publisher, versions: Versions) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.publish, 1, Sent({}))
            versions.acknowledge("quick", 1)
            while late.asked < 2:
                assert versions.published == 0
                await anyio.sleep(0.05)
            versions.acknowledge("late", 1)

    events = publishing(body, quick, late, source=source)
    assert source.offers == [(["quick", "late"], False), (["late"], True)]
    assert [type(event) for event in events] == [PublishStarted, PublishFailed, Published]
    assert (quick.asked, late.asked) == (1, 2)


def test_a_version_that_all_have_loaded_waits_for_nobody_to_be_served() -> None:
    """A load of the try before may have ended well, so that the generator never meets rank 0 in this one."""

    async def body(publisher: Publisher, versions: Versions) -> None:
        versions.acknowledge("generator", 1)
        await publisher.publish(1, Sent({}))
        assert virtual_clock() < 1.0

    events = publishing(body, Generator(), source=Source(hangs=1))
    assert [type(event) for event in events] == [PublishStarted, Published]


def test_what_a_publish_took_and_sent_is_logged() -> None:
    generator = Generator(takes=Loaded(transfer_s=0.25, stage_s=0.5, pause_s=0.125, staged_bytes=80))

    async def body(publisher: Publisher, versions: Versions) -> None:
        versions.acknowledge("generator", 1)
        await publisher.publish(1, Sent({}, bytes=7, gather_s=2.0))

    [_, published] = publishing(body, generator)
    assert isinstance(published, Published)
    figures = (published.gather_s, published.transfer_s, published.stage_s, published.pause_s)
    assert figures == (2.0, 0.25, 0.5, 0.125)
    assert (published.bytes, published.sent_bytes) == (80, 7)
