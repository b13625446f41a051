"""With time slicing the ranks work only while every generator sleeps, and ages, fates and replays are as without."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrl.collectors.collector import Collector
from asyncrl.collectors.engines.base import Cache
from asyncrl.engine import metrics
from asyncrl.engine.events.types import (
    ActorRestarted,
    Dispatched,
    GroupFailed,
    OwnerDead,
    Published,
    Put,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.records.work import RankResult, TrainWork
from asyncrl.engine.testing.fakes import HANG_S, FakeGenerator, FakeRank, FakeTask
from asyncrl.engine.testing.simulation import Outcome, Remote, simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.replay import replay

PROMPTS = 30


class Device:
    """Notes who is on it: what a test would find used by two at once."""

    def __init__(self) -> None:
        self.generating = 0
        self.training = False
        self.faults: list[str] = []

    def look(self, what: str) -> None:
        if self.training and self.generating:
            self.faults.append(what)


class OnDevice(FakeGenerator):
    """A generator whose samples take a device's time while it is awake."""

    device: Device

    async def sleep(self, cache: Cache) -> None:
        await FakeGenerator.sleep(self, cache)
        self.device.generating -= 1

    async def wake(self) -> None:
        self.device.generating += 1
        self.device.look("a generator woke")
        await FakeGenerator.wake(self)


def ranks_on(device: Device) -> type[FakeRank]:
    class Rank(FakeRank):
        async def train(self, work: TrainWork) -> RankResult:
            assert device.training
            device.look("a step")
            return await FakeRank.train(self, work)

        async def wake(self) -> None:
            device.training = True
            device.look("a rank woke")

        async def sleep(self) -> None:
            device.training = False

    return Rank


def run(
    *,
    collectors: int = 2,
    seconds: Callable[[int], float] = lambda call: 1.0 + call % 3,
    device: Device | None = None,
    generators: list[FakeGenerator] | None = None,
    remote: Remote | None = None,
    collector: type[Collector] = Collector,
    gap: tuple[float, float] = (0.0, 0.0),
    **values: Any,
) -> Outcome:
    given = {"run__steps": None, "task__epochs": 1, "filters": [], "rollout__max_staleness": 2, **values}
    config = simulated_config(collector__count=collectors, cluster__time_slicing="keep", **given)
    device = device or Device()
    if generators is None:
        generators = [OnDevice(seconds=seconds) for _ in range(collectors)]
        OnDevice.device = device
        device.generating = collectors
    return simulate(
        config,
        task=FakeTask(PROMPTS),
        generators=generators,
        rank=ranks_on(device),
        rank_gap=lambda _: gap,
        remote=remote,
        collector=collector,
    )


def check(outcome: Outcome) -> None:
    assert (outcome.audit.faults, outcome.keys_left) == ([], [])
    assert replay(recording_of(outcome)).difference is None


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("remote", [None, Remote()])
def test_ranks_and_generators_are_never_at_work_at_once(staleness: int, remote: Remote | None) -> None:
    device = Device()
    outcome = run(device=device, remote=remote, rollout__max_staleness=staleness)
    assert (outcome.ending.code, outcome.ending.reason, device.faults) == (0, "data exhausted", [])
    steps = outcome.of(StepEnded)
    assert len(steps) > 10
    assert max(int(age) for step in steps for age in step.ages) <= staleness
    # Every version is published before the device is the ranks' again.
    published = {event.version: event.t for event in outcome.of(Published)}
    assert all(published[event.version] <= event.t for event in outcome.of(StepStarted))
    assert all(metrics.DEVICE_WAIT in step.metrics for step in steps)
    check(outcome)


def test_groups_go_on_where_they_stood_and_their_time_stands_still() -> None:
    """Groups of 8 s with a limit of 9 s meet steps of 1 s each: they end, and none of them fails."""
    outcome = run(collectors=1, seconds=lambda call: 8.0 if call % 4 == 3 else 1.0, collector__group_timeout_s=9.0)
    begun = {event.group: event.t for event in outcome.of(Dispatched)}
    assert max(event.t - begun[event.group] for event in outcome.of(Put)) > 9.0
    assert not outcome.of(GroupFailed)
    check(outcome)


def test_a_batch_without_a_step_gives_the_device_back() -> None:
    device = Device()
    outcome = run(device=device, gap=(1.0, 0.5), filters=[{"name": "importance_outliers", "max_log_ratio": 0.1}])
    assert device.faults == []
    assert not outcome.of(StepEnded)
    assert outcome.ending.reason.startswith("data exhausted")
    assert outcome.audit.faults == []


@pytest.mark.parametrize("killed_at", [1.5, 2.5, 3.5, 4.5, 5.5])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_collector_that_dies_in_any_slice_is_replaced_while_no_step_runs(killed_at: float, hangs: bool) -> None:
    device = Device()
    generators: list[FakeGenerator] = [FakeGenerator(seconds=lambda call: 1.0 + call % 3) for _ in range(2)]
    remote = Remote(killed_at={"collector0": [killed_at]}, restart_s=4.0, hangs=hangs)
    outcome = run(device=device, generators=generators, remote=remote, supervision__answer_timeout_s=5.0)
    assert (outcome.ending.code, outcome.ending.reason) == (0, "data exhausted")
    [death], [restart] = outcome.of(OwnerDead), outcome.of(ActorRestarted)
    assert (death.replaced, restart.actor) == (True, "collector0")
    began, ended = restart.t - 4.0, restart.t
    inside = [event for event in outcome.of(StepStarted) if began < event.t < ended]
    assert inside == []
    prompts = [event for event in outcome.of(Dispatched) if event.retry_of is None]
    assert len(prompts) == PROMPTS
    check(outcome)


class Deaf(Collector):
    """The first collector never says that it sleeps."""

    async def sleep(self, cache: Cache) -> None:
        if self.name == "collector0":
            await anyio.sleep(HANG_S)
        await super().sleep(cache)


class LateDeaf(Collector):
    """The first collector of its name does not say that it sleeps, from the third time on."""

    times = 0

    async def sleep(self, cache: Cache) -> None:
        if self.name == "collector0":
            LateDeaf.times += 1
            if LateDeaf.times == 3:
                await anyio.sleep(HANG_S)
        await super().sleep(cache)


def test_who_does_not_hand_over_ends_the_run_where_nobody_replaces_it() -> None:
    outcome = run(collector=Deaf, generators=[FakeGenerator(), FakeGenerator()])
    assert outcome.ending.code == 1
    assert "collector0 did not sleep within 240 s (trainer.publish_timeout_s" in outcome.ending.reason


def test_who_does_not_hand_over_is_killed_and_replaced() -> None:
    LateDeaf.times = 0
    outcome = run(collector=LateDeaf, generators=[FakeGenerator(), FakeGenerator()], remote=Remote(restart_s=2.0))
    assert (outcome.ending.code, outcome.ending.reason) == (0, "data exhausted")
    assert [event.owner for event in outcome.of(OwnerDead)] == ["collector0"]
    check(outcome)


def test_a_rank_that_does_not_wake_ends_the_run() -> None:
    class Stuck(FakeRank):
        async def wake(self) -> None:
            if self.steps == 2:
                await anyio.sleep(HANG_S)

    config = simulated_config(cluster__time_slicing="keep", rollout__max_staleness=1)
    outcome = simulate(config, rank=Stuck)
    assert (outcome.ending.code, len(outcome.of(StepEnded))) == (1, 2)
    assert "rank0 did not wake within 120 s" in outcome.ending.reason
    assert outcome.audit.faults == []
