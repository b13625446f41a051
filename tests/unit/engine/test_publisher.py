"""The publisher: a version counts when it is acknowledged, and the dead are not asked twice."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asyncrl.engine.errors import ActorDied
from asyncrl.engine.events.log import EventLog
from asyncrl.engine.groups import Groups
from asyncrl.engine.publisher import Publisher
from asyncrl.engine.run_ahead import RunAhead
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.testing.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.versions import Versions


class Generator:
    """Takes weights at once, or is dead; counts how often it was asked."""

    name = "generator"

    def __init__(self, *, dead: bool = False) -> None:
        self.dead = dead
        self.asked = 0

    async def update_weights(self, version: int, handle: Any) -> None:
        self.asked += 1
        if self.dead:
            raise ActorDied("generator died", actor=self.name)


def publishing(generator: Generator, body: Callable[[Publisher, Versions], Awaitable[None]]) -> None:
    """Run `body` on a publisher to one generator, with the trainer at version 1."""

    async def main() -> None:
        versions = Versions([generator.name])
        versions.advance()
        log = EventLog(clock=virtual_clock, wall=virtual_clock, folds=[])
        plane: Any = None
        groups = Groups(plane=plane, partition="train", consumer="trainer", log=log, run_ahead=RunAhead(1))
        trainer = simulated_config(trainer__publish_tries=3).trainer
        handle: Any = generator
        publisher = Publisher(trainer, [handle], groups=groups, versions=versions, events=log, clock=virtual_clock)
        await body(publisher, versions)

    run_virtual(main)


def test_a_publish_ends_with_its_acknowledgement_and_not_with_the_call() -> None:
    async def body(publisher: Publisher, versions: Versions) -> None:
        async def acknowledge() -> None:
            await anyio.sleep(5.0)
            versions.acknowledge("generator", 1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acknowledge)
            await publisher.publish(1, None)
            assert virtual_clock() >= 5.0
            assert versions.published == 1

    publishing(Generator(), body)


def test_a_dead_generator_is_asked_once() -> None:
    dead = Generator(dead=True)

    async def body(publisher: Publisher, versions: Versions) -> None:
        with pytest.raises(ActorDied):
            await publisher.publish(1, None)
        assert dead.asked == 1

    publishing(dead, body)
