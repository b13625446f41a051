"""Handles on Ray actors: whose limit a call has."""

from typing import Any, cast

import anyio
import pytest
from ray.exceptions import RayTaskError

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.errors import ActorDied, NotWritten
from asyncrl.engine.lifecycle.ray_handles import RemoteActor, RemoteCollector, RemoteRank
from asyncrl.engine.lifecycle.ray_restarts import RayRestarter
from asyncrl.engine.lifecycle.replica import Replica
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


class Model:
    """The actor of a rank that keeps a part of a model; what is whole needs all of them at once."""

    def __init__(self, part: int, asked: list[tuple[int, str]], parts: int) -> None:
        self.call = self
        self._part, self._asked, self._parts = part, asked, parts

    async def remote(self, method: str, *_: Any) -> Any:
        self._asked.append((self._part, method))
        if self._part == 9:
            raise ActorDied("rank9 died", actor="rank9")
        with anyio.fail_after(1000):
            while len(self._asked) < self._parts:
                await anyio.sleep(1)
        return 7


@pytest.mark.parametrize("method", ["weights", "hold_weights", "copy_weights"])
def test_ranks_with_parts_of_a_model_lend_them_while_rank_0_gathers(method: str) -> None:
    """Called one after the other each would wait for the others."""

    async def main() -> None:
        asked: list[tuple[int, str]] = []
        config = simulated_config()
        lenders = [RemoteRank(f"rank{i}", Model(i, asked, 3), config) for i in (1, 2)]
        replica = Replica([RemoteRank("rank0", Model(0, asked, 3), config)], lenders)
        assert await getattr(replica, method)(*([None] if method == "copy_weights" else [])) == 7
        assert sorted(asked) == [(0, method), (1, "lend_weights"), (2, "lend_weights")]

    run_virtual(main)


def test_a_lender_that_dies_ends_the_gathering() -> None:
    async def main() -> None:
        asked: list[tuple[int, str]] = []
        lender = RemoteRank("rank9", Model(9, asked, 3), simulated_config())
        with pytest.raises(ActorDied, match="rank9 died"):
            await Replica([RemoteRank("rank0", Model(0, asked, 3), simulated_config())], [lender]).weights()

    run_virtual(main)


class Placed:
    """A collector's handle that ends at once."""

    name = "collector0"

    async def end(self) -> None:
        pass


def test_a_part_that_is_started_again_is_waited_for_only_as_long_as_its_node_lives() -> None:
    async def main() -> None:
        lost_at = 7.0
        restarter = RayRestarter(
            lambda _: anyio.sleep_forever(), start_s=240.0, is_lost=lambda name: virtual_clock() >= lost_at
        )
        restarter.start("collector0", lambda: cast(RemoteCollector, Placed()))
        with pytest.raises(ActorDied, match="collector0 died with its node"):
            await restarter.restart("collector0")
        assert lost_at <= virtual_clock() < lost_at + 2

    run_virtual(main)


def test_what_a_part_raises_while_it_connects_comes_out_as_it_was() -> None:
    async def fail(_: RemoteCollector) -> None:
        raise ActorDied("collector0 died during connect", actor="collector0")

    async def main() -> None:
        restarter = RayRestarter(fail, start_s=240.0)
        restarter.start("collector0", lambda: cast(RemoteCollector, Placed()))
        with pytest.raises(ActorDied, match="during connect"):
            await restarter.restart("collector0")

    run_virtual(main)
