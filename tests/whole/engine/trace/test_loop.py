"""Dispatcher, publisher, gate and endings: what they may not do is a difference of the replay, by the log alone."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from asyncrl.engine.events.types import (
    Acknowledged,
    AnyEvent,
    BatchTaken,
    Claimed,
    Dispatched,
    Published,
    PublishStarted,
    Released,
    RunEnded,
    Settled,
    StepEnded,
)
from asyncrl.engine.loop.batch import Batch, TrainedBatch
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.dispatcher import Dispatcher
from asyncrl.engine.loop.front_end import FrontEnd
from asyncrl.engine.loop.groups import Groups
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of, seeded_delays
from asyncrl.engine.trace.difference import Difference
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay

TRACES = Path(__file__).parents[3] / "traces"


class LeakyGroups(Groups):
    """The capacity of one group never comes back."""

    def release(self, groups: Any) -> None:
        super().release([group for group in groups if group != 5])


class Leaky(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups.__class__ = LeakyGroups


class Generous(Controller):
    """More groups are out than the configuration lets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.groups.run_ahead.limit += 1


class PaysEarly(Controller):
    """Capacity comes back when a publish begins, not when it is acknowledged."""

    async def _publish(self, trained: MemoryObjectReceiveStream[TrainedBatch]) -> None:
        async for batch in trained:
            self.core.published(batch.version)
            await self.publisher.publish(batch.version, batch.weights)


class OpenGate(FrontEnd):
    """The gate holds nothing back."""

    async def _gate(self, batch: Batch, wanted: int) -> None:
        return None


class Open(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.front_end.__class__ = OpenGate


class HurriedDispatcher(Dispatcher):
    """It does not pace."""

    def _may_grant(self) -> bool:
        return self._prompts.more and self._groups.run_ahead.free > 0


class Hurried(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dispatcher.__class__ = HurriedDispatcher


def run(controller: type[Controller], **settings: Any) -> Recording:
    given = {"rollout__max_staleness": 1, "rollout__groups_per_step": 2, "run__steps": 8, "task__epochs": 9, **settings}
    outcome = simulate(
        simulated_config(**given),
        task=FakeTask(7, lambda prompt, index: float((prompt + index) % 3)),
        generators=[
            FakeGenerator(seconds=seeded_delays(21)),
            FakeGenerator(seconds=seeded_delays(22, mean_s=6.0, spread=1.0), refuse=lambda version: 0.5),
        ],
        rank_seconds=seeded_delays(23, mean_s=1.5),
        controller=controller,
    )
    return recording_of(outcome)


PACED = {"rollout__pacing": True, "rollout__max_staleness": 3}
GATE = {"rollout__stale_mode": "gate", "rollout__max_staleness": 2}
FAULTS: dict[str, tuple[type[Controller], dict[str, Any], str, str]] = {
    "a leaked slot": (Leaky, {}, "run_ended", "was due and never came back"),
    "a group too many": (Generous, {}, "dispatched", "4 groups are out, and run-ahead is 4"),
    "capacity before the publish": (PaysEarly, {}, "released", "came back before it was due"),
    "a gate that stands open": (Open, GATE, "claimed", "the gate holds a claim of 2 groups back"),
    "grants in spite of pacing": (
        Hurried,
        PACED,
        "dispatched",
        "a whole batch waits",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_loop_is_found_by_the_replay_of_its_log(fault: str) -> None:
    """FOUND-L3: what was forced was trusted; it is held to the rules that the log can tell."""
    planted, settings, event, why = FAULTS[fault]
    assert replay(run(Controller, **settings)).difference is None
    found = replay(run(planted, **settings)).difference
    assert found is not None
    assert (found.event.split()[0], why in found.why) == (event, True), found


@cache
def trace(name: str) -> Recording:
    return Recording.read(TRACES / f"{name}.jsonl")


Events = list[AnyEvent]


def found(name: str, change: Callable[[Events], object]) -> Difference:
    events = list(trace(name).events)
    change(events)
    difference = replay(Recording(events)).difference
    assert difference is not None
    return difference


def places(events: Events, kind: type[Any], **fields: Any) -> list[int]:
    return [
        at
        for at, event in enumerate(events)
        if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
    ]


def set_fields(kind: type[Any], which: int, **fields: Any) -> Callable[[Events], None]:
    def change(events: Events) -> None:
        at = places(events, kind)[which]
        events[at] = msgspec.structs.replace(events[at], **fields)

    return change


def move(kind: type[Any], before: type[Any], **fields: Any) -> Callable[[Events], None]:
    """Move the first such event to before the last event of another kind that stands before it."""

    def change(events: Events) -> None:
        at = places(events, kind, **fields)[0]
        events.insert(max(place for place in places(events, before) if place < at), events.pop(at))

    return change


def swap_prompts(events: Events) -> None:
    """Of two grants of a later epoch."""
    one, other = places(events, Dispatched, retry_of=None)[15:17]
    first, second = events[one], events[other]
    assert isinstance(first, Dispatched)
    assert isinstance(second, Dispatched)
    events[one] = msgspec.structs.replace(first, prompt=second.prompt)
    events[other] = msgspec.structs.replace(second, prompt=first.prompt)


def backwards(events: Events) -> None:
    at = next(at for at in places(events, Claimed) if len(getattr(events[at], "groups", ())) > 1)
    claim = events[at]
    assert isinstance(claim, Claimed)
    events[at] = msgspec.structs.replace(claim, groups=claim.groups[::-1])


CHANGES: list[tuple[str, Callable[[Events], object], str, str]] = [
    ("gate", swap_prompts, "dispatched", "is not next by seed and epoch"),
    ("gate", set_fields(Dispatched, 3, seed=5), "dispatched", "seed 5"),
    ("gate", set_fields(Dispatched, 3, group=9), "dispatched", "numbers go up by one"),
    ("refill", set_fields(Dispatched, 5, retry_of=1), "dispatched", "it is a retry of group 1, and next is none"),
    ("gate", move(Published, Acknowledged, version=2), "published", "version 2, which collector"),
    ("gate", set_fields(PublishStarted, 2, version=3), "publish_started", "version 3, while version 1 was last"),
    ("gate", set_fields(Acknowledged, 4, version=0), "acknowledged", "version 0, after 1"),
    ("gate", move(Released, Published), "released", "came back before it was due"),
    ("overlap", move(BatchTaken, StepEnded, batch=2), "batch_taken", "the replay does not say it"),
    ("gate", backwards, "claimed", "are not taken oldest version first"),
    ("gate", set_fields(RunEnded, 0, reason="step limit reached"), "run_ended", "the limit is None"),
    ("tokens", set_fields(RunEnded, 0, reason="data exhausted"), "run_ended", "were never judged"),
]


@pytest.mark.parametrize(("name", "change", "event", "why"), CHANGES)
def test_an_order_that_no_loop_makes_is_found_at_its_event(
    name: str, change: Callable[[Events], object], event: str, why: str
) -> None:
    """FOUND-L3: prompts, publishes, capacity, the turn of batches, and how a run ends."""
    difference = found(name, change)
    assert (difference.event.split()[0], why in difference.why) == (event, True), difference


def test_groups_are_cancelled_only_if_so_configured_and_too_old_for_any_batch() -> None:
    """FOUND-L3: a cancelled group is waste that the log can explain, or not."""
    recording = trace("refill")
    assert any("dropped:cancelled_stale" in e.fates for e in recording.events if isinstance(e, Settled))
    config = recording.config()
    patient = config.model_copy(update={"rollout": config.rollout.model_copy(update={"cancel_stale": False})})
    difference = replay(recording, config=patient).difference
    assert difference is not None
    assert "a batch could have trained it" in difference.why


def test_groups_are_recalled_only_of_a_collector_that_was_late() -> None:
    """FOUND-C3: by the log, and by the balance's rule."""
    config = simulated_config(
        collector__count=2, rollout__max_staleness=1, rollout__groups_per_step=4, run__steps=3, rollout__requeue_tries=1
    )
    generators = [FakeGenerator(), FakeGenerator(seconds=lambda call: 10.0)]
    outcome = simulate(config, generators=generators, rank_seconds=lambda step: 0.5)
    recording = recording_of(outcome)
    assert sum("dropped:recalled" in e.fates for e in recording.events if isinstance(e, Settled)) == 4
    assert replay(recording).difference is None
    waits = config.model_copy(update={"rollout": config.rollout.model_copy(update={"stale_mode": "gate"})})
    difference = replay(recording, config=waits).difference
    assert difference is not None
    assert "its collector was neither late nor to leave" in difference.why


def test_a_script_without_a_controller_is_held_to_none_of_this() -> None:
    """FOUND-L3: it publishes nothing, and dispatches what it is told to."""
    golden = Path(__file__).parent / "traces" / "everything.jsonl"
    assert replay(Recording.read(golden)).difference is None
