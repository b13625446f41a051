"""The publisher: a version counts when it is acknowledged, and the dead are not asked twice."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.errors import ActorDied, Overdue
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.loop.publisher import Publisher
from asyncrl.engine.loop.versions import Versions
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.weights.base import Offer, Sent
from asyncrl.engine.weights.stand_in import NoWeights


class Generator:
    """Takes weights at once, after `refusals`, or is dead; counts how often it was asked."""

    def __init__(self, name: str = "generator", *, dead: bool = False, refusals: int = 0) -> None:
        self.name = name
        self.dead = dead
        self.refusals = refusals
        self.asked = 0

    async def update_weights(self, version: int, offer: Offer) -> None:
        self.asked += 1
        if self.dead:
            raise ActorDied("generator died", actor=self.name)
        if self.asked <= self.refusals:
            await anyio.sleep(0.1)
            raise OSError("not yet")


def publishing(body: Callable[[Publisher, Versions], Awaitable[None]], *generators: Generator) -> None:
    """Run `body` on a publisher to generators, with the trainer at version 1."""

    async def main() -> None:
        versions = Versions([generator.name for generator in generators])
        versions.advance()
        log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[])
        trainer = simulated_config(trainer__publish_tries=3).trainer
        handles: Any = generators
        publisher = Publisher(trainer, handles, NoWeights(), versions=versions, events=log, clock=virtual_clock)
        await body(publisher, versions)

    run_virtual(main)


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


def test_a_dead_generator_is_asked_once() -> None:
    dead = Generator(dead=True)

    async def body(publisher: Publisher, versions: Versions) -> None:
        with pytest.raises(ActorDied):
            await publisher.publish(1, Sent({}))
        assert dead.asked == 1

    publishing(body, dead)


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
