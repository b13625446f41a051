"""Handles on Ray actors: whose limit a call has."""

from typing import Any

import anyio
import pytest
from ray.exceptions import RayTaskError

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.errors import ActorDied, NotWritten
from asyncrl.engine.lifecycle.ray_runtime import RemoteActor, RemoteCollector, RemoteRank
from asyncrl.engine.model.folder import Note
from asyncrl.engine.testing.simulation import simulated_config
from asyncrl.engine.weights.base import Offer


class Slow:
    """An actor of Ray's that answers every call after so many seconds; references are awaited."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.call = self

    async def remote(self, method: str, args: Any, kwargs: Any) -> list[Any]:
        await anyio.sleep(self._seconds)
        return []


def test_a_long_poll_has_the_limit_of_the_supervisor_that_awaits_it_and_no_other() -> None:
    """FOUND-C5: with `answer_timeout_s` 60 the poll asks to wait for 20 s; an answer after 55 s was 25 s too late."""

    async def main() -> None:
        assert await RemoteActor("rank0", Slow(55.0), 60.0).events(0, 20.0) == []
        assert virtual_clock() == 55.0

    run_virtual(main)


def test_an_update_of_weights_has_the_publishers_limit_and_other_calls_their_own() -> None:
    """FOUND-C1: an update that is late is a failed try; it is no death of the collector."""

    async def main() -> None:
        config = simulated_config(trainer__publish_timeout_s=10.0, supervision__answer_timeout_s=60.0)
        collector = RemoteCollector("collector0", Slow(100.0), config)
        await collector.update_weights(1, Offer({}))
        with pytest.raises(ActorDied, match="collector0 did not answer grant within 60 s"):
            await collector.grant([])

    run_virtual(main)


def test_a_full_disk_of_a_rank_is_told_without_rays_traceback() -> None:
    class Full:
        call: Any

        async def remote(self, *_: Any) -> None:
            raise RayTaskError("save_held", "a traceback", NotWritten("no space left")).as_instanceof_cause()

    async def main() -> None:
        actor = Full()
        actor.call = actor
        rank = RemoteRank("rank0", actor, simulated_config())
        with pytest.raises(NotWritten, match=r"^no space left$") as told:
            await rank.save_held(["model"], Note(1, 1, None, 1, "0"))
        assert not isinstance(told.value, RayTaskError)

    run_virtual(main)
