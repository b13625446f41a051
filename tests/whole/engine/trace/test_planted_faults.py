"""Faults planted in the product that recorded a run: its replay, by the sound product, says where and in what."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest

from asyncrl.engine.aio.virtual_time import run_virtual, virtual_clock
from asyncrl.engine.deployment import CONSUMER, PARTITION
from asyncrl.engine.events.types import Claimed, Planned, WorkGiven
from asyncrl.engine.loop.batch import Batch
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.loop.core import Core
from asyncrl.engine.loop.refill_budget import RefillBudget
from asyncrl.engine.loop.selection import Selection
from asyncrl.engine.loop.stages import Stages
from asyncrl.engine.records import MicroBatch, Plan
from asyncrl.engine.records.columns import COLUMNS
from asyncrl.engine.records.work import ForwardWork, SampleWork, TrainWork, Update
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask, fake_group
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of, seeded_delays
from asyncrl.engine.trace.difference import Difference
from asyncrl.engine.trace.forced_plane import OWNER, ForcedPlane, current_batch
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import replay


def recorded(controller: type[Controller] = Controller, **settings: Any) -> Recording:
    """Two ranks, two updates, stale tokens, a reference: everything that a rank can be given."""
    given = {
        "trainer__ranks": 2,
        "trainer__updates_per_batch": 2,
        "trainer__reference_kl": 0.1,
        "trainer__loss_normalisation": "sequence_mean",
        "rollout__groups_per_step": 3,
        "run__steps": 3,
        **settings,
    }
    outcome = simulate(
        simulated_config(**given),
        task=FakeTask(12, lambda prompt, index: float((prompt + index) % 3)),
        generators=[FakeGenerator(seconds=seeded_delays(1), length=lambda call: 2 + call % 5)],
        controller=controller,
    )
    return recording_of(outcome)


@cache
def sound() -> Recording:
    return recorded()


def found(recording: Recording) -> Difference:
    difference = replay(recording).difference
    assert difference is not None
    return difference


class FlippedCore(Core):
    """Advantages have the other sign."""

    def _select(self, batch: Batch) -> Selection:
        selection = super()._select(batch)
        return replace(
            selection, samples={key: one._replace(advantage=-one.advantage) for key, one in selection.samples.items()}
        )


class Flips(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.__class__ = FlippedCore


class EvenStages(Stages):
    """Every token counts the same, whatever normalisation was asked for."""

    def _scales(self, plan: Plan, selection: Selection) -> dict[str, float]:
        return dict.fromkeys(selection.lengths, 1.0)


class ForgetfulStages(Stages):
    """Nothing is withheld from the ranks but one token, of every sample."""

    async def _on_ranks(self, works: Any, call: Any) -> list[Any]:
        changed = [
            replace(work, samples={key: one._replace(withheld=1) for key, one in work.samples.items()})
            for work in works
        ]
        return await super()._on_ranks(changed, call)


class Even(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core._step._stages.__class__ = EvenStages


class Forgets(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core._step._stages.__class__ = ForgetfulStages


class ModestBudget(RefillBudget):
    """A batch is one group short."""

    def wanted(self, batch: Batch) -> int:
        return max(0, super().wanted(batch) - 1)


class GreedyBudget(RefillBudget):
    """A batch has one group more than it should."""

    def wanted(self, batch: Batch) -> int:
        return max(0, super().wanted(batch) + (not batch.judged))


class Modest(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.front_end._refill.__class__ = ModestBudget


class Greedy(Controller):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core.front_end._refill.__class__ = GreedyBudget


def test_what_every_rank_is_given_replays() -> None:
    """FOUND-L3: each stage of each step has its digests, and the replay has the same."""
    given = [event for event in sound().events if isinstance(event, WorkGiven)]
    assert [(event.step, event.stage) for event in given[:3]] == [
        (1, "logprobs"),
        (1, "reference_logprobs"),
        (1, "train"),
    ]
    assert len(given) == 9
    assert all(len(event.parts) == len(event.samples) == 2 for event in given)
    assert replay(sound()).difference is None


def test_advantages_of_the_wrong_sign_are_found_by_rank_and_sample() -> None:
    """FOUND-L3: the log held no advantages, so that a replay derived its own and compared them with nothing."""
    difference = found(recorded(Flips))
    assert difference.event == "work_given step 1"
    first = next(event for event in sound().events if isinstance(event, Planned))
    assert difference.why.startswith("the logprobs stage gave rank 0 other advantages, first of v0_p")
    assert any(key in difference.why for micro in first.ranks[0] + first.ranks[1] for key in micro)
    assert "; in the replay it has advantage " in difference.why


def test_a_token_scale_that_was_not_asked_for_is_found() -> None:
    """FOUND-L3: a factor of the loss normalisation."""
    difference = found(recorded(Even))
    assert "the train stage gave rank 0 other advantages, scales, first of v0_p" in difference.why
    alone = found(recorded(Even, trainer__reference_kl=0.0)).why
    assert alone.startswith("the train stage gave rank 0 other advantages, first of")


def test_tokens_withheld_without_a_reason_are_found() -> None:
    """FOUND-L3: they are part of what a loss is computed from."""
    assert "gave rank 0 other withheld, first of" in found(recorded(Forgets)).why


@pytest.mark.parametrize(("controller", "asked"), [(Modest, 2), (Greedy, 4)])
def test_a_batch_of_another_size_is_found_at_its_claim(controller: type[Controller], asked: int) -> None:
    """FOUND-L3: forced claims were handed out whatever was asked for, and a batch one group short replayed."""
    difference = found(recorded(controller))
    assert difference.event == "claimed"
    assert difference.why == f"a claim of {asked} groups in the log, of at most 3 in the replay"


def without_asked(recording: Recording) -> Recording:
    return Recording(
        [msgspec.structs.replace(e, asked=None) if isinstance(e, Claimed) else e for e in recording.events]
    )


def test_a_short_batch_is_found_in_a_log_that_does_not_say_what_was_asked_for() -> None:
    """FOUND-L3: a batch is short only where nothing more comes."""
    assert replay(without_asked(sound())).difference is None
    difference = found(without_asked(recorded(Modest)))
    assert (difference.event, difference.why) == ("batch_judged batch 0", "the replay does not say it")
    assert found(without_asked(recorded(Greedy))).why == "a claim of 4 groups in the log, of at most 3 in the replay"


@pytest.mark.parametrize("odd", [{"columns": ("tokens",)}, {"owner": "driver"}, {"claim_id": "driver/0"}])
def test_a_forced_claim_is_one_that_the_contract_allows(odd: dict[str, Any]) -> None:
    """FOUND-L3: a front end that asks for too few columns, or as somebody else, is found by any log."""

    async def refused(**how: Any) -> str:
        plane = ForcedPlane(clock=virtual_clock, group_size=2)
        await plane.start()
        current_batch.set(0)
        plane.expect(0)
        plane.allow(0, [fake_group(0, [0.0, 1.0])], asked=1)
        await plane.claim(PARTITION, CONSUMER, max_groups=1, **how)
        return plane.refused

    sound = {"columns": COLUMNS, "owner": OWNER, "claim_id": f"{OWNER}/0"}
    assert run_virtual(lambda: refused(**sound)) == ""
    assert "it should claim" in run_virtual(lambda: refused(**{**sound, **odd}))


def digests(**changes: Any) -> Mapping[str, int]:
    """Return those of two samples' work; a change that is of samples has a value by key."""
    columns: dict[str, Any] = {
        "advantage": {"a": 0.1, "b": -0.1},
        "scale": {"a": 1.5, "b": 0.5},
        "withheld": {"a": 0, "b": 1},
        "prompt_tokens": {"a": 2, "b": 2},
    }
    columns |= {name: changes.pop(name) for name in columns.keys() & changes.keys()}
    samples = {
        key: SampleWork(key=key, response_tokens=2, **{name: by[key] for name, by in columns.items()})
        for key in columns["advantage"]
    }
    base = TrainWork(
        step=1,
        micro_batches=(MicroBatch(("a", "b"), 7), MicroBatch(("a",), 3, filler=True)),
        samples=samples,
        total_tokens=5,
        updates=(Update(1, 3), Update(1, 2)),
        columns=("reference_logprobs",),
    )
    return replace(base, **changes).digests


PARTS: list[tuple[dict[str, Any], Sequence[str]]] = [
    ({"micro_batches": (MicroBatch(("b", "a"), 7), MicroBatch(("a",), 3, filler=True))}, ["micro_batches"]),
    ({"micro_batches": (MicroBatch(("a", "b"), 7), MicroBatch(("a",), 3))}, ["micro_batches"]),
    ({"advantage": {"a": -0.1, "b": 0.1}}, ["advantages"]),
    ({"advantage": {"a": 0.1, "b": -0.1000000000000001}}, ["advantages"]),
    ({"scale": {"a": None, "b": None}}, ["scales"]),
    ({"withheld": {"a": 0, "b": 0}}, ["withheld"]),
    ({"prompt_tokens": {"a": 2, "b": 3}}, ["prompt_tokens"]),
    ({"total_tokens": 6}, ["counts"]),
    ({"updates": (Update(1, 2), Update(1, 3))}, ["counts"]),
    ({"pad_to": 8}, ["counts"]),
    ({"columns": ()}, ["columns"]),
    ({"advantage": {"b": -0.1, "a": 0.1}}, []),
]


@pytest.mark.parametrize(("changes", "parts"), PARTS)
def test_a_part_of_the_work_that_changes_has_another_digest(changes: dict[str, Any], parts: Sequence[str]) -> None:
    """FOUND-L3: order of mappings apart, since it differs between processes."""
    before, after = digests(), digests(**changes)
    assert [name for name in before if before[name] != after[name]] == list(parts)


def test_a_forward_stage_that_writes_has_another_digest_and_samples_survive_their_journey() -> None:
    samples = {"a": SampleWork("a", 2, 4, 0.1, withheld=1), "b": SampleWork("b", 2, 3, -0.1, scale=0.5)}
    work = ForwardWork(1, (MicroBatch(("a", "b"), 12),), samples, total_tokens=7)
    other = replace(work, write=True)
    assert [name for name, digest in work.digests.items() if digest != other.digests[name]] == ["columns"]
    for sent in (
        work,
        other,
        replace(work, micro_batches=(), samples={}),
        TrainWork(1, work.micro_batches, samples, 7),
    ):
        assert pickle.loads(pickle.dumps(sent)) == sent


def test_digests_are_the_same_on_every_platform() -> None:
    """FOUND-L3: as first written; a log from another machine must agree."""
    assert digests()["advantages"] == 2823891022
    assert digests()["micro_batches"] == 622865527
