"""New weights that meet groups in flight: a collector over an engine, both real but for the model, in virtual time."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import torch

from asyncrl.collectors.collector import Collector, CollectorSettings
from asyncrl.collectors.engines.base import Chunk, Request, Result, Sampling
from asyncrl.collectors.generators.base import GroupRequest
from asyncrl.collectors.generators.engine_generator import EngineGenerator, OnUpdate
from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.data_plane.base import Partition
from asyncrl.engine.data_plane.local import LocalPlane
from asyncrl.engine.errors import StoreFull, VersionError
from asyncrl.engine.model.tokenizer import CharTokenizer
from asyncrl.engine.records import Grant, GroupMeta, Prompt
from asyncrl.engine.records.columns import COLUMNS, TOKENS
from asyncrl.engine.records.fate import CANCELLED
from asyncrl.engine.records.message import GroupFailure, Message, PutNotice
from asyncrl.engine.records.spans import sample_spans
from asyncrl.engine.simulate.virtual_loop import in_place_scorer
from asyncrl.engine.testing.fakes import FakeTask, FaultyPlane
from asyncrl.engine.testing.scripted_engine import ScriptedEngine
from asyncrl.engine.weights.base import InProcess, Offer

SIZE, TOKENS_EACH = 4, 10
STATE = {"w": torch.zeros(2)}
EVERY_WAY: list[OnUpdate] = ["keep", "recompute", "continue", "restart"]


def digit(_request: Request | None, _index: int, version: int) -> int:
    """Return a token whose text is the version's last digit, for the fake task to score."""
    return CharTokenizer().encode(str(version % 10))[0]


@dataclass
class Desk:
    """A collector at work, its engine, and what it says."""

    collector: Collector
    engine: ScriptedEngine
    plane: LocalPlane
    messages: list[Message] = field(default_factory=list)
    _seen: int = 0

    async def ended(self, count: int) -> dict[int, PutNotice | GroupFailure]:
        """Return what became of the first `count` groups that ended."""
        while True:
            ends = {
                (m.group.group if isinstance(m, PutNotice) else m.group): m
                for m in self.messages
                if isinstance(m, PutNotice | GroupFailure)
            }
            if len(ends) >= count:
                return ends
            numbered = await self.collector.events(self._seen, 1e6)
            self._seen = numbered[-1][0] if numbered else self._seen
            self.messages += [message for _, message in numbered]

    async def whole(self, count: int) -> list[GroupMeta]:
        """Return the first `count` groups, which must all have been put."""
        ends = await self.ended(count)
        assert [m for m in ends.values() if isinstance(m, GroupFailure)] == []
        return [m.group for _, m in sorted(ends.items()) if isinstance(m, PutNotice)]

    async def grant(self, *groups: int) -> None:
        await self.collector.grant([Grant(n, Prompt(n % 4, f"{n % 4}>", "0", "fake"), SIZE, 3) for n in groups])


def at_desk(
    work: Callable[[Desk], Awaitable[None]],
    engine: ScriptedEngine,
    *,
    on_update: OnUpdate = "keep",
    before_put: Callable[[int], Any] | None = None,
    group_timeout_s: float = 1000.0,
) -> None:
    """Run `work` beside a collector whose responses have ten tokens each."""

    async def main() -> None:
        plane = LocalPlane(clock=virtual_clock)
        await plane.register(Partition("train", SIZE, COLUMNS, ("trainer",)))
        collector = Collector(
            "collector0",
            CollectorSettings("train", 1.0, TOKENS_EACH, 1000.0, group_timeout_s, 1000.0),
            generator=EngineGenerator(engine, Sampling(TOKENS_EACH), on_update=on_update),
            scorer=in_place_scorer(FakeTask()),
            tokenizer=CharTokenizer(),
            plane=FaultyPlane(plane, {"put": before_put} if before_put else {}),
            transport=InProcess(),
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.run)
            await work(Desk(collector, engine, plane))
            tasks.cancel_scope.cancel()

    run_virtual(main)


def scripted(**more: Any) -> ScriptedEngine:
    """Return an engine that makes a token per second in each of its rows."""
    return ScriptedEngine(STATE, **{"rows": 64, "token_s": 1.0, "make": digit, **more})


@pytest.mark.parametrize("on_update", EVERY_WAY)
def test_an_update_ends_no_group_in_flight(on_update: OnUpdate) -> None:
    """CASE-H4, CASE-A8: all ten end whole, with the new version; what begins anew keeps no token of the old one."""

    async def work(desk: Desk) -> None:
        await desk.grant(*range(10))
        await anyio.sleep(4.5)
        await desk.collector.update_weights(1, Offer(STATE))
        groups = await desk.whole(10)
        assert {(group.version, group.tags["end_version"]) for group in groups} == {(0, 1)}
        assert {tuple(group.response_tokens) for group in groups} == {(TOKENS_EACH,) * SIZE}
        versions = {tuple(version for version, _, _ in spans) for group in groups for spans in sample_spans(group)}
        for group in groups:
            rows = (await desk.plane.read("train", group.keys, COLUMNS))[TOKENS]
            for row, spans in zip(rows, sample_spans(group), strict=True):
                told = [digit(None, 0, version) for version, first, end in spans for _ in range(first, end)]
                assert row.tolist()[-TOKENS_EACH:] == told
        assert versions == ({(1,)} if on_update == "restart" else {(0, 1)})

    at_desk(work, scripted(), on_update=on_update)


def test_an_engine_gets_a_weight_that_was_sent_once_under_all_its_names() -> None:
    async def work(desk: Desk) -> None:
        with pytest.raises(VersionError, match="names or shapes differ"):
            await desk.collector.update_weights(1, Offer(STATE))
        await desk.collector.update_weights(1, Offer(STATE, twins={"head": "w"}))

    at_desk(work, ScriptedEngine({**STATE, "head": torch.zeros(2)}))


@pytest.mark.parametrize("on_update", EVERY_WAY)
def test_a_collector_tells_its_state_while_an_update_holds_the_engine(on_update: OnUpdate) -> None:
    """CASE-B6: whoever asks before the engine is let go, as on the last step, is answered at once."""

    async def work(desk: Desk) -> None:
        await desk.grant(0, 1)
        await anyio.sleep(4.5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.collector.update_weights, 1, Offer(STATE))
            # While weights are staged, while the engine comes to its halt, and while they are swapped.
            for second in (10, 30, 60, 90, 119):
                await anyio.sleep(4.5 + second - virtual_clock())
                with anyio.fail_after(1.0):
                    status = await desk.collector.status()
                assert status["version"] == 0
        assert (await desk.collector.status())["version"] == 1
        assert len(await desk.whole(2)) == 2

    at_desk(work, scripted(stage_s=60.0, swap_s=60.0), on_update=on_update)


@pytest.mark.parametrize("on_update", EVERY_WAY)
def test_an_update_ends_while_the_store_is_full_and_64_requests_are_out(on_update: OnUpdate) -> None:
    """CASE-B15: nothing that the update waits for waits for the store, or for a request to end."""

    def full(call: int) -> None:
        if virtual_clock() < 100.0:
            raise StoreFull("no room")

    async def work(desk: Desk) -> None:
        await desk.grant(*range(32))
        await anyio.sleep(15.0)
        stats = await desk.engine.stats()
        assert stats.running + stats.waiting == 64
        await desk.collector.update_weights(1, Offer(STATE))
        assert virtual_clock() == pytest.approx(15.0 + 2.0 + 1.0)
        with pytest.raises(VersionError, match="serves version 1"):
            await desk.collector.update_weights(0, Offer(STATE))
        assert len(await desk.whole(32)) == 32

    at_desk(work, scripted(stage_s=2.0, swap_s=1.0), on_update=on_update, before_put=full)


@pytest.mark.parametrize("on_update", EVERY_WAY)
def test_groups_that_are_given_up_during_an_update_free_their_slots(on_update: OnUpdate) -> None:
    """CASE-B20: all five end at once, the update goes on, and the next group has its turn."""

    async def work(desk: Desk) -> None:
        await desk.grant(*range(5))
        await anyio.sleep(4.5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.collector.update_weights, 1, Offer(STATE))
            await anyio.sleep(1.0)
            await desk.collector.cancel(range(5))
            ends = await desk.ended(5)
            assert virtual_clock() == pytest.approx(5.5)
            assert {end.reason for end in ends.values() if isinstance(end, GroupFailure)} == {CANCELLED}
            stats = await desk.engine.stats()
            assert (stats.running, stats.waiting, stats.version) == (0, 0, 0)
        assert (await desk.engine.stats()).version == 1
        await desk.grant(5)
        assert (await desk.ended(6))[5].group.version == 1  # type: ignore[union-attr]

    at_desk(work, scripted(stage_s=2.0, swap_s=1.0), on_update=on_update)


def test_who_waits_for_requests_that_an_engine_aborts_is_told() -> None:
    """CASE-B20: five groups, aborted by the engine in the middle of an update."""

    async def work(desk: Desk) -> None:
        await desk.grant(*range(5))
        await anyio.sleep(4.5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.collector.update_weights, 1, Offer(STATE))
            await anyio.sleep(2.5)
            await desk.engine.abort()
            ends = await desk.ended(5)
            assert virtual_clock() == pytest.approx(7.0)
        assert all("the engine aborted it" in end.error for end in ends.values() if isinstance(end, GroupFailure))
        assert {type(end) for end in ends.values()} == {GroupFailure}
        assert (await desk.collector.status())["running"] == 0

    at_desk(work, scripted(stage_s=2.0, swap_s=1.0))


def test_a_group_that_waits_for_rows_ages_from_its_dispatch() -> None:
    """CASE-B16: it decodes under version 1 alone, and says 0, which served when it took its share of run-ahead."""

    async def work(desk: Desk) -> None:
        await desk.grant(0, 1)
        await anyio.sleep(4.5)
        status = await desk.collector.status()
        assert (status["running"], status["waiting"], status["in_flight"]) == (SIZE, SIZE, 2)
        await desk.collector.update_weights(1, Offer(STATE))
        _, waited = await desk.whole(2)
        assert (waited.version, waited.tags["end_version"]) == (0, 1)
        assert sample_spans(waited) == [[(1, 0, TOKENS_EACH)]] * SIZE

    at_desk(work, scripted(rows=SIZE))


class HangsOnOne(ScriptedEngine):
    """Never says anything of sample 2 of the first group."""

    async def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
        if request.id == "0/2":
            await anyio.sleep_forever()
        async for item in ScriptedEngine.generate(self, request):
            yield item


def test_a_sample_that_hangs_costs_its_group_alone_and_leaves_no_request_behind() -> None:
    """CASE-B4: its siblings give their rows back at the group's time limit; the other group is whole."""

    async def work(desk: Desk) -> None:
        await desk.grant(0, 1)
        ends = await desk.ended(2)
        failure = ends[0]
        assert isinstance(failure, GroupFailure)
        assert failure.reason == "timeout"
        assert isinstance(ends[1], PutNotice)
        assert virtual_clock() == pytest.approx(31.0)
        stats = await desk.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    at_desk(work, HangsOnOne(STATE, rows=64, token_s=1.0, make=digit), group_timeout_s=30.0)


def test_an_update_that_is_given_up_leaves_no_engine_paused() -> None:
    """CASE-B15: whoever gives up while the engine still comes to its halt has it resumed."""

    class Stubborn(ScriptedEngine):
        async def pause(self, in_flight: Any = "keep") -> None:
            await super().pause(in_flight)
            await anyio.sleep(5.0)

    async def main() -> None:
        generator = EngineGenerator(Stubborn(STATE, token_s=1.0), Sampling(4), on_update="continue")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run)
            with anyio.move_on_after(2.0):
                await generator.update_weights(1, STATE)
            with anyio.fail_after(100.0):
                assert len(await generator.generate(GroupRequest((1, 2), (1, 2), 4, 1.0))) == 2
            tasks.cancel_scope.cancel()

    run_virtual(main)
