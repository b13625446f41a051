"""Replay: the same log in, the same decisions out; and every change of a log is found where it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.engine.errors import TraceError
from asyncrl.engine.events.types import (
    AnyEvent,
    BatchJudged,
    BatchTaken,
    Claimed,
    Dispatched,
    Judged,
    Measured,
    Planned,
    Put,
    RunEnded,
    Settled,
    StepEnded,
    StepStarted,
    digest_written,
)
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import simulate, simulated_config
from asyncrl.engine.testing.trace import recording_of
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.replay import rank_works, replay
from asyncrl.filters import BaseRolloutFilter, Chain, FilterContext, GroupView, Verdict, drop, keep

Record = Callable[..., Recording]

REFILL = [{"name": "zero_std"}, {"name": "dynamic_sampling", "max_attempts": 8}]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="default"),
        pytest.param({"rollout__max_staleness": 0}, id="synchronous"),
        pytest.param(
            {"rollout__max_staleness": 1, "rollout__requeue_tries": 2, "rollout__cancel_stale": True}, id="cancel"
        ),
        pytest.param({"rollout__stale_mode": "gate"}, id="gate"),
        pytest.param({"rollout__stale_mode": "tokens", "rollout__max_staleness": 1}, id="tokens"),
        pytest.param({"filters": REFILL}, id="refill"),
        pytest.param({"filters": [{"name": "difficulty", "low": 0.2, "high": 0.9}]}, id="statistics"),
        pytest.param({"trainer__micro_batch_tokens": 11}, id="many micro-batches"),
        pytest.param({"task__epochs": 1, "run__steps": None}, id="to the end of the data"),
        pytest.param({"run__steps": None, "run__batches": 15}, id="batch limit"),
    ],
)
def test_a_recorded_run_replays_to_identical_verdicts_plans_and_fates(record: Record, settings: dict[str, Any]) -> None:
    recording = record(**settings)
    replayed = replay(recording)
    assert replayed.difference is None
    for kind in (Judged, BatchJudged, StepStarted, Settled):
        names = [name for name in kind.__struct_fields__ if name not in ("seq", "t", "wall")]
        sides = [
            sorted(str([getattr(e, n) for n in names]) for e in events if isinstance(e, kind))
            for events in (recording.events, replayed.events)
        ]
        assert sides[0] == sides[1]
        assert sides[0]


def test_a_run_on_ray_replays(golden_log: Callable[[str], Path]) -> None:
    """Recorded by `asyncrl train --config reverse` on Ray and TransferQueue, with refill."""
    recording = Recording.read(golden_log("ray-reverse"))
    replayed = replay(recording)
    assert replayed.difference is None
    assert sum(isinstance(event, Planned) for event in replayed.events) == 5


def test_a_log_of_the_first_schema_replays(golden_log: Callable[[str], Path]) -> None:
    """It has no batch_taken, no digests, and configuration values that came later are missing."""
    recording = Recording.read(golden_log("schema-1"))
    assert recording.started.schema == 1
    assert "record" not in recording.started.config["run"]
    assert not any(isinstance(event, BatchTaken) for event in recording.events)
    assert replay(recording).difference is None


def test_running_statistics_are_derived_again(record: Record) -> None:
    outcome = simulate(simulated_config(), task=FakeTask(reward=lambda prompt, index: prompt + index / 4))
    again = replay(recording_of(outcome)).statistics
    assert again.state_dict() == outcome.controller.core.judged.state_dict()
    assert again.prompts


def test_filters_after_logprobs_judge_by_what_the_ranks_had_measured(record: Record) -> None:
    def gap(key: str) -> tuple[float, float]:
        return (0.9, 0.1) if key.endswith("g0") else (0.1, 0.0)

    recording = record(rank_gap=gap, filters=[{"name": "importance_outliers", "max_log_ratio": 0.5}])
    fates = {fate for event in recording.events if isinstance(event, Settled) for fate in event.fates}
    assert "masked:importance_outliers" in fates
    assert replay(recording).difference is None
    at = places(recording, Measured)[0]
    measured = recording.events[at]
    assert isinstance(measured, Measured)
    even = msgspec.structs.replace(measured, log_ratios={key: [0.1, 0.0] for key in measured.log_ratios})
    found = replay(changed(recording, at, even)).difference
    assert found is not None
    assert found.event.startswith("planned")


def changed(recording: Recording, at: int, event: AnyEvent) -> Recording:
    return Recording([*recording.events[:at], event, *recording.events[at + 1 :]])


def places(recording: Recording, kind: type[Any]) -> list[int]:
    return [place for place, event in enumerate(recording.events) if isinstance(event, kind)]


def test_any_changed_reward_is_found_at_its_put(record: Record) -> None:
    """Whether the group was judged, dropped, trained or only buffered at the end."""
    recording = record()
    for at in [*places(recording, Put)[:-1:12], places(recording, Put)[-1]]:
        put = recording.events[at]
        assert isinstance(put, Put)
        rewards = [*put.tags["reward"][:-1], 0.123]
        found = replay(changed(recording, at, msgspec.structs.replace(put, tags={**put.tags, "reward": rewards})))
        assert found.difference is not None
        assert found.difference.seq == put.seq
        assert str(found.difference).startswith(
            f"event {put.seq}, put group {put.group}: its tags were changed after the put"
        )


def test_a_reward_changed_together_with_its_digest_is_found_at_the_verdict(record: Record) -> None:
    recording = record()
    first = next(event for event in recording.events if isinstance(event, Judged))
    at = next(p for p in places(recording, Put) if getattr(recording.events[p], "group", None) == first.group)
    put = recording.events[at]
    assert isinstance(put, Put)
    tags = {**put.tags, "reward": [0.123, *put.tags["reward"][1:]]}
    found = replay(changed(recording, at, msgspec.structs.replace(put, tags=tags, digest=digest_written(tags))))
    assert found.difference is not None
    assert found.difference.seq == first.seq


CHANGES: list[tuple[type[Any], dict[str, Any], str]] = [
    (Judged, {"age": 7}, "age is"),
    (Judged, {"dropped": "other"}, "dropped is 'other' in the log"),
    (Judged, {"masked": {2: "x"}}, "masked is"),
    (BatchJudged, {"reward_sum": 0.25}, "reward_sum is 0.25 in the log"),
    (BatchJudged, {"kept": 99}, "kept is 99 in the log"),
    (Planned, {"ranks": [[["v0_p0_g0"]], [["v0_p0_g1"]]]}, "ranks is"),
    (StepStarted, {"version": 40}, "version is 40"),
    (StepEnded, {"tokens": 1}, "tokens is 1"),
    (StepEnded, {"ages": {"9": 1}}, "ages is"),
    (Settled, {"fates": ["trained"]}, "fates is"),
]


@pytest.mark.parametrize(("kind", "fields", "why"), CHANGES)
def test_a_changed_decision_is_found_at_its_event(
    record: Record, kind: type[Any], fields: dict[str, Any], why: str
) -> None:
    recording = record()
    for at in places(recording, kind)[1:4:2]:
        event = recording.events[at]
        found = replay(changed(recording, at, msgspec.structs.replace(event, **fields))).difference
        assert found is not None
        assert found.seq == event.seq
        assert why in found.why


def test_a_decision_that_the_log_lacks_or_has_twice_is_found(record: Record) -> None:
    recording = record()
    at = places(recording, Judged)[3]
    without = replay(Recording([*recording.events[:at], *recording.events[at + 1 :]])).difference
    assert without is not None
    twice = replay(Recording([*recording.events[: at + 1], *recording.events[at:]])).difference
    assert twice is not None
    assert "twice in the log" in twice.why


def test_a_claim_of_a_group_that_was_never_put_is_found_at_the_claim(record: Record) -> None:
    recording = record()
    at = places(recording, Claimed)[2]
    claim = recording.events[at]
    assert isinstance(claim, Claimed)
    found = replay(changed(recording, at, msgspec.structs.replace(claim, groups=[*claim.groups, 777]))).difference
    assert found is not None
    assert (found.seq, "777" in found.why) == (claim.seq, True)


def test_another_filter_or_bound_makes_a_difference_at_the_first_verdict_that_it_changes(record: Record) -> None:
    recording = record()
    config = recording.config()
    found = replay(recording, config=config, chain=Chain([])).difference
    assert found is not None
    flat = next(e for e in recording.events if isinstance(e, Judged) and e.dropped == "zero_std")
    assert found.seq == flat.seq
    assert "dropped is 'zero_std' in the log, None in the replay" in found.why


class RaisesOnGroup(BaseRolloutFilter):
    def __init__(self, group: int) -> None:
        self._group = group

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        if group.group == self._group:
            raise RuntimeError("no such column")
        return keep()


def test_a_filter_that_raises_in_the_replay_alone_is_a_difference_with_its_error(record: Record) -> None:
    recording = record(chain=[])
    found = replay(recording, chain=Chain([RaisesOnGroup(4)])).difference
    assert found is not None
    assert "it stopped with RuntimeError: no such column" in found.why


def test_a_run_that_a_filter_ended_replays_to_the_same_end(record: Record) -> None:
    outcome = simulate(simulated_config(), filters=[RaisesOnGroup(4)])
    assert outcome.ending.code == 1
    recording = recording_of(outcome)
    assert replay(recording, chain=Chain([RaisesOnGroup(4)])).difference is None
    assert recording.ended is not None
    other = msgspec.structs.replace(recording.ended, reason="OSError: disk full")
    found = replay(Recording([*recording.events[:-1], other]), chain=Chain([RaisesOnGroup(4)])).difference
    assert found is not None
    assert found.event.startswith("run_ended")


def test_refill_that_is_exhausted_replays_to_the_same_end() -> None:
    config = simulated_config(
        filters=[{"name": "zero_std"}, {"name": "dynamic_sampling", "max_attempts": 2}], run__steps=None, run__batches=9
    )
    outcome = simulate(config, task=FakeTask.in_order(lambda group, index: float(index % 2) if group < 6 else 1.0))
    assert "dynamic sampling used up" in outcome.ending.reason
    assert replay(recording_of(outcome)).difference is None


def test_a_log_cut_off_anywhere_replays_as_far_as_it_goes(record: Record) -> None:
    recording = record()
    for end in range(2, len(recording.events), 41):
        assert replay(Recording(recording.events[:end])).difference is None


def test_a_filter_given_in_code_replays_with_that_filter(record: Record) -> None:
    class Odd(BaseRolloutFilter):
        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return drop("odd") if context.rng(group).random() < 0.4 else keep()

    recording = record(chain=[Odd()])
    assert replay(recording, chain=Chain([Odd()])).difference is None
    assert any(isinstance(e, Judged) and e.dropped == "Odd/odd" for e in recording.events)


def test_the_work_of_each_rank_is_that_of_the_plan(record: Record) -> None:
    recording = record()
    replayed = replay(recording)
    for planned in (event for event in recording.events if isinstance(event, Planned)):
        works = rank_works(replayed, planned.step)
        assert [[list(batch.keys) for batch in work.micro_batches] for work in works] == planned.ranks
    with pytest.raises(TraceError, match="no step 99; it has steps 1 to 8"):
        rank_works(replayed, 99)


def test_a_log_without_its_beginning_is_refused(record: Record, tmp_path: Path) -> None:
    recording = record()
    with pytest.raises(TraceError, match="no run_started event"):
        replay(Recording(recording.events[1:]))
    with pytest.raises(TraceError, match="cannot be read"):
        Recording.read(tmp_path / "nowhere")
    (tmp_path / "events.jsonl").write_text(json.dumps({"type": "put"}) + "\n")
    with pytest.raises(TraceError, match=r"events\.jsonl, line 1"):
        Recording.read(tmp_path)


def test_a_failed_or_lost_group_replays(record: Record) -> None:
    recording = record()
    fates = {fate for event in recording.events if isinstance(event, Settled) for fate in event.fates}
    assert {"failed:generation_error", "trained", "dropped:zero_std", "dropped:run_ended", "masked:nan_reward"} <= fates
    assert any(isinstance(event, Dispatched) for event in recording.events)
    assert isinstance(recording.events[-1], RunEnded)


def test_stale_groups_replay() -> None:
    config = simulated_config(rollout__max_staleness=1, run__steps=20, rollout__groups_per_step=1)
    uneven = FakeGenerator(seconds=lambda call: 30.0 if call % 4 == 1 else 1.0)
    outcome = simulate(config, generators=[uneven], rank_seconds=lambda step: 0.5)
    assert outcome.ledger.by_reason("dropped").get("stale", 0) > 0
    assert replay(recording_of(outcome)).difference is None
