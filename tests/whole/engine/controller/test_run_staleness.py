"""Ages and stamps of whole runs in virtual time; the cases A of staleness accounting."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import pytest

from asyncrl.collectors.generators.base import Completion, GroupRequest
from asyncrl.engine.errors import TagError
from asyncrl.engine.events.types import Dispatched, Judged, Put, StepStarted
from asyncrl.engine.loop.controller import Controller
from asyncrl.engine.testing.fakes import FakeGenerator, fake_group
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config


def slow_first(seconds: float) -> Callable[[int], float]:
    return lambda call: seconds if call == 0 else 1.0


def reasons(outcome: Outcome) -> dict[str, int]:
    return {reason: n for reason, n in outcome.ledger.by_reason("dropped").items() if reason != "run_ended"}


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_no_trained_sample_is_older_than_the_bound_nor_from_the_future(staleness: int) -> None:
    """CASE-A1, CASE-A12: the bound is inclusive, and judged when the batch is trained, not when it was put."""
    generator = FakeGenerator(seconds=lambda call: (1.0, 7.0, 0.5, 3.0, 12.0)[call % 5])
    outcome = simulate(
        simulated_config(rollout__max_staleness=staleness, run__steps=30, rollout__groups_per_step=3),
        generators=[generator],
    )
    audit = outcome.audit
    assert outcome.ending.code == 0
    assert audit.faults == []
    assert set(audit.ages) <= set(range(staleness + 1))
    assert max(audit.ages) == staleness or staleness > 1
    histogram = {age: audit.ages.count(age) for age in set(audit.ages)}
    assert dict(outcome.progress.ages) == histogram


def test_a_group_waits_too_long_and_is_dropped_once_as_stale_with_its_key_cleared() -> None:
    """CASE-A12: dispatched at version 0, finished when the trainer is over the bound."""
    config = simulated_config(rollout__max_staleness=2, run__steps=12)
    outcome = simulate(config, generators=[FakeGenerator(seconds=slow_first(8.0))])
    [stale] = [event for event in outcome.of(Judged) if event.dropped == "stale"]
    assert stale.group == 0
    assert stale.by == "front_end"
    assert stale.age > 2
    assert reasons(outcome) == {"stale": 4}
    assert outcome.audit.fates[0] == ["dropped:stale"] * 4
    assert outcome.keys_left == []
    assert outcome.audit.faults == []


class LoadsWhileGenerating(FakeGenerator):
    """Tokens carry the version in force at the end of the call: all were made after a load."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        completions = await FakeGenerator.generate(self, request)
        return [replace(c, spans=((self.version, 0, len(c.token_ids)),)) for c in completions]


@pytest.mark.parametrize(("staleness", "seconds", "fate"), [(1, 3.5, "dropped:stale"), (3, 2.5, "trained")])
def test_the_stamp_is_the_version_at_dispatch_though_newer_weights_were_loaded_meanwhile(
    staleness: int, seconds: float, fate: str
) -> None:
    """CASE-A2, CASE-A7: versions pass by while group 0 is in the generator; it is judged by 0, not by its newest."""
    config = simulated_config(rollout__max_staleness=staleness, rollout__max_publish_lag=1, run__steps=8)
    outcome = simulate(config, generators=[LoadsWhileGenerating(seconds=slow_first(seconds))])
    [put] = [event for event in outcome.of(Put) if event.group == 0]
    assert (put.tags["version"], put.keys[0]) == (0, "v0_p0_g0")
    assert put.tags["end_version"] >= 1
    [judged] = [event for event in outcome.of(Judged) if event.group == 0]
    assert judged.age >= 2
    assert outcome.audit.fates[0] == [fate] * 4


def test_the_version_counts_training_batches_and_not_prompts() -> None:
    """CASE-A3: a step's groups carry the served version however many prompts were fed."""
    config = simulated_config(
        rollout__groups_per_step=70, rollout__group_size=2, rollout__max_staleness=2, run__steps=2, task__epochs=None
    )
    outcome = simulate(config, rank_seconds=lambda step: 100.0)
    stamps = [event.tags["version"] for event in outcome.of(Put)]
    assert stamps[:210] == [0] * 210
    assert set(stamps[210:]) == {1}


def test_a_group_newer_than_the_trainer_ends_the_run_with_an_error_and_no_keys() -> None:
    """CASE-A1, CASE-A5: it is never taken for fresh."""

    async def forge(controller: Controller) -> None:
        await anyio.sleep(0.5)
        controller.core.versions.jump_to(-1)

    outcome = simulate(simulated_config(run__steps=3), beside=forge)
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, TagError)
    assert "newer than the trainer's" in outcome.ending.reason
    assert outcome.keys_left == []
    assert outcome.audit.ages == []


def test_slow_publishing_at_staleness_zero_delays_the_step_and_evicts_nothing() -> None:
    """CASE-A9: every publish takes 50 s, steps take 1 s."""
    generator = FakeGenerator(refuse=lambda version: 50.0)
    outcome = simulate(simulated_config(rollout__max_staleness=0, run__steps=4), generators=[generator])
    assert outcome.ending.code == 0
    assert set(outcome.audit.ages) == {0}
    assert reasons(outcome) == {}
    assert set(outcome.audit.lags) == {0}
    assert outcome.seconds >= 200


def test_at_staleness_zero_work_is_scheduled_and_a_batch_is_in_flight_at_once() -> None:
    """CASE-A11."""
    config = simulated_config(rollout__max_staleness=0, rollout__groups_per_step=4, run__steps=1)
    outcome = simulate(config)
    assert max(outcome.audit.run_ahead) == 4
    assert outcome.seconds == 2.0


def test_a_group_that_times_out_fails_whole_and_its_prompt_is_not_continued() -> None:
    """CASE-A8, CASE-B4: no later group has tokens of the one that hung."""
    config = simulated_config(collector__group_timeout_s=5.0, rollout__max_staleness=1, run__steps=8)
    generator = FakeGenerator(seconds=slow_first(1e6))
    outcome = simulate(config, generators=[generator])
    assert outcome.ending.code == 0
    assert outcome.audit.fates[0] == ["failed:timeout"] * 4
    assert [event.group for event in outcome.of(Put) if event.group == 0] == []
    dispatched = [event.group for event in outcome.of(Dispatched)]
    assert len(dispatched) == len(set(dispatched))
    assert {event.tags["version"] for event in outcome.of(Put)} >= {event.version for event in outcome.of(StepStarted)}
    for event in outcome.of(Put):
        assert event.tags["response_tokens"] == [2] * 4


def test_no_group_is_granted_with_a_version_that_is_not_served() -> None:
    """CASE-H5: two generators load at different speeds; each stamps what it serves itself."""
    slow = FakeGenerator(refuse=lambda version: 9.0)
    config = simulated_config(collector__count=2, rollout__max_staleness=3, rollout__max_publish_lag=2, run__steps=12)
    outcome = simulate(config, generators=[FakeGenerator(), slow])
    audit = outcome.audit
    assert audit.faults == []
    assert audit.born
    assert all(born <= audit.served_at_put[group] for group, born in audit.born.items())
    assert max(audit.born.values()) > 2


def test_an_age_needs_a_version_tag() -> None:
    """CASE-A3: a group without one is an error, not age 0."""
    group = fake_group(0, [0.0, 1.0])
    bare = type(group)(group.keys, {name: value for name, value in group.tags.items() if name != "version"})
    with pytest.raises(TagError, match="v0_p0_g0: tag 'version' is missing"):
        bare.age(0)
