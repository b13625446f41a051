"""Flow of whole runs: data and its end, failing groups, lost notices, capacity."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrl.collectors.tasks import Reward
from asyncrl.engine.data_plane.base import DataPlane
from asyncrl.engine.data_plane.passing import PassingPlane
from asyncrl.engine.errors import GenerationError, Overdue
from asyncrl.engine.events.types import (
    BatchJudged,
    Claimed,
    Dispatched,
    GroupFailed,
    Put,
    Released,
    Settled,
    StepStarted,
)
from asyncrl.engine.records.message import PutNotice
from asyncrl.engine.testing.fakes import HANG_S, FakeGenerator, FakeTask, FaultyPlane
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config

REFILL = [{"name": "zero_std"}, {"name": "dynamic_sampling", "max_attempts": 50}]


def raising(*calls: int, error: type[Exception] = RuntimeError) -> Callable[[int], None]:
    def fail(call: int) -> None:
        if call in calls:
            raise error(f"call {call} went wrong")

    return fail


def faulty(**before: Callable[[int], Any]) -> Callable[[DataPlane], DataPlane]:
    return lambda plane: FaultyPlane(plane, before)


def clean(outcome: Outcome) -> bool:
    """Say whether nothing is left: no key, no sample without a fate, no fault in the events."""
    return outcome.keys_left == [] and outcome.ledger.unsettled == [] and outcome.audit.faults == []


def always(error: Exception) -> Callable[[int], None]:
    def fail(call: int) -> None:
        raise error

    return fail


def test_a_generator_that_always_raises_ends_the_run_in_seconds_with_its_own_error() -> None:
    """CASE-B1: exit 1 with the collector's traceback, and no keys."""
    config = simulated_config(run__steps=2)
    outcome = simulate(config, generators=[FakeGenerator(fail=always(OSError("CUDA is gone")))])
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, GenerationError)
    first = outcome.ending.reason.splitlines()[0]
    assert "8 groups in a row failed in collector0" in first
    assert first.endswith("OSError: CUDA is gone")
    assert "Traceback" in str(outcome.ending.error)
    assert outcome.seconds < 10
    assert clean(outcome)


def test_failures_with_good_groups_between_do_not_end_the_run() -> None:
    config = simulated_config(collector__max_failures_in_a_row=3, run__steps=6, rollout__max_staleness=0)
    generator = FakeGenerator(fail=lambda call: raising(call)(call) if call % 2 else None)
    outcome = simulate(config, generators=[generator])
    assert outcome.ending.code == 0
    assert outcome.ledger.by_reason("failed")["generation_error"] >= 12


def test_failures_in_a_row_are_counted_by_collector() -> None:
    """A broken collector ends the run whatever a good one delivers; a few failures of each do not add up."""
    config = simulated_config(collector__count=2, collector__max_failures_in_a_row=3, run__steps=8)
    broken = simulate(config, generators=[FakeGenerator(), FakeGenerator(fail=always(OSError("CUDA is gone")))])
    assert broken.ending.code == 1
    assert "3 groups in a row failed in collector1" in broken.ending.reason

    def twice(call: int) -> None:
        if call < 2:
            raise OSError("a hiccup")

    outcome = simulate(config, generators=[FakeGenerator(fail=twice), FakeGenerator(fail=twice)])
    assert outcome.ending.code == 0
    assert outcome.ledger.by_reason("failed")["generation_error"] == 16


@pytest.mark.parametrize(("epochs", "steps", "reason"), [(1, 2, "data exhausted"), (3, 5, "step limit reached")])
def test_a_run_goes_through_its_epochs_and_then_says_that_the_data_is_exhausted(
    epochs: int, steps: int, reason: str
) -> None:
    """CASE-B2: 4 prompts, 2 a step, 5 steps asked for."""
    outcome = simulate(simulated_config(task__epochs=epochs, run__steps=5), task=FakeTask(prompts=4))
    assert (outcome.ending.code, outcome.ending.reason) == (0, reason)
    assert outcome.progress.steps == steps
    assert clean(outcome)


@pytest.mark.parametrize("staleness", [0, 2])
def test_without_a_number_of_epochs_data_never_ends(staleness: int) -> None:
    """CASE-B2."""
    config = simulated_config(task__epochs=None, run__steps=40, rollout__max_staleness=staleness)
    assert simulate(config, task=FakeTask(prompts=1)).progress.steps == 40


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("prompts", [1, 3, 5])
def test_the_partial_tail_is_trained_and_does_not_hang(staleness: int, refill: bool, prompts: int) -> None:
    """CASE-B2: 3 prompts, 2 a step."""
    config = simulated_config(task__epochs=1, rollout__max_staleness=staleness, filters=REFILL if refill else [])
    outcome = simulate(config, task=FakeTask(prompts=prompts))
    assert (outcome.ending.code, outcome.ending.reason) == (0, "data exhausted")
    assert [len(event.groups) for event in outcome.of(StepStarted)] == [2] * (prompts // 2) + [1]
    assert outcome.ledger.trained == 4 * prompts
    assert outcome.seconds < 20


def test_every_prompt_of_every_epoch_is_dispatched_once_an_epoch() -> None:
    outcome = simulate(simulated_config(task__epochs=3, run__steps=None), task=FakeTask(prompts=6))
    assert Counter(event.prompt for event in outcome.of(Dispatched)) == dict.fromkeys(range(6), 3)


@pytest.mark.parametrize("refill", [False, True])
def test_dropped_groups_give_their_capacity_back_and_later_ones_are_trained(refill: bool) -> None:
    """CASE-B7: ceiling 2; the first two groups are flat, the next two are good."""
    task = FakeTask.in_order(lambda group, index: 1.0 if group < 2 else float(index % 2))
    filters = REFILL if refill else [{"name": "zero_std"}]
    config = simulated_config(rollout__max_staleness=0, run__steps=1, filters=filters)
    outcome = simulate(config, task=task)
    assert outcome.ending.code == 0
    assert [event.groups for event in outcome.of(StepStarted)] == [[2, 3]]
    assert outcome.audit.fates[0] == outcome.audit.fates[1] == ["dropped:zero_std"] * 4
    assert max(outcome.audit.run_ahead) == 2


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_of_many_drops_never_starves(staleness: int) -> None:
    """CASE-B7: nine groups of ten are dropped, for hundreds of groups."""
    task = FakeTask.in_order(lambda group, index: float(index % 2) if group % 10 == 9 else 0.0, prompts=1000)
    config = simulated_config(rollout__max_staleness=staleness, run__steps=12, filters=REFILL)
    outcome = simulate(config, task=task)
    assert outcome.progress.steps == 12
    assert outcome.ledger.by_reason("dropped")["zero_std"] >= 4 * 200


def test_tasks_that_never_return_free_their_slots_by_the_time_limit() -> None:
    """CASE-B8: 3 of 128 hang."""
    config = simulated_config(
        rollout__groups_per_step=128, rollout__max_staleness=0, run__steps=1, collector__group_timeout_s=30.0
    )
    generator = FakeGenerator(seconds=lambda call: HANG_S if call in (5, 50, 100) else 1.0)
    outcome = simulate(config, generators=[generator], task=FakeTask(prompts=200))
    assert outcome.ending.code == 0
    assert [event.reason for event in outcome.of(GroupFailed)] == ["timeout"] * 3
    assert outcome.ledger.trained == 4 * 128
    assert len(outcome.of(Dispatched)) >= 131
    assert generator.running == 0
    assert clean(outcome)


def test_a_failed_group_frees_its_slot_at_once_in_both_modes() -> None:
    """CASE-B8, section 2.7: it failed before it was judged."""
    for filters in ([], REFILL):
        config = simulated_config(rollout__max_staleness=0, run__steps=1, filters=filters)
        outcome = simulate(config, generators=[FakeGenerator(fail=raising(0))])
        kinds = [type(event) for event in outcome.events]
        at = kinds.index(GroupFailed)
        assert kinds[at : at + 3] == [GroupFailed, Settled, Released]
        assert outcome.of(Released)[0].groups == [0]
        assert outcome.progress.steps == 1


def test_with_the_skip_policy_a_group_that_raises_is_one_failure_and_its_siblings_train() -> None:
    """CASE-B9: one of four raises RuntimeError("x")."""
    config = simulated_config(rollout__groups_per_step=4, rollout__max_staleness=0, task__epochs=1)
    outcome = simulate(config, generators=[FakeGenerator(fail=raising(1))], task=FakeTask(prompts=4))
    assert outcome.ending.code == 0
    assert outcome.ledger.by_reason("failed") == {"generation_error": 4}
    assert outcome.ledger.trained == 12
    [failure] = outcome.of(GroupFailed)
    assert "RuntimeError: call 1 went wrong" in failure.error


def test_with_the_abort_policy_the_first_group_that_raises_ends_the_run_with_its_error() -> None:
    """CASE-B9."""
    config = simulated_config(rollout__groups_per_step=4, collector__on_error="abort")
    outcome = simulate(config, generators=[FakeGenerator(fail=raising(1))])
    assert outcome.ending.code == 1
    assert "RuntimeError: call 1 went wrong" in str(outcome.ending.error)
    assert outcome.seconds == 1.0
    assert clean(outcome)


def broken_for(group: int, *indexes: int) -> FakeTask:
    def reward(number: int, index: int) -> float:
        if number == group and index in indexes:
            raise LookupError("no such answer")
        return float(index % 2)

    return FakeTask.in_order(reward)


def test_a_reward_that_raises_fails_its_sample_and_the_group_counts_up() -> None:
    """CASE-B10, CASE-E6: sample 2 fails, its siblings are trained, keys are gone."""
    outcome = simulate(simulated_config(run__steps=2, rollout__max_staleness=0), task=broken_for(0, 2))
    assert outcome.audit.fates[0] == ["trained", "trained", "failed:score_error", "trained"]
    assert outcome.audit.tags[0]["reward"][2] is None
    assert outcome.ledger.by_reason("failed") == {"score_error": 1}
    assert clean(outcome)


def test_a_single_survivor_of_failures_is_dropped_with_a_reason() -> None:
    """C6."""
    outcome = simulate(simulated_config(run__steps=2, rollout__max_staleness=0), task=broken_for(0, 0, 1, 2))
    assert outcome.audit.fates[0] == ["failed:score_error"] * 3 + ["dropped:few_live"]
    assert clean(outcome)


def test_when_every_sample_of_every_group_fails_the_run_ends_with_the_error_of_the_reward() -> None:
    """C6: it points to a broken server; dropping groups in silence does not."""

    def reward(prompt: int, index: int) -> float:
        raise ConnectionError("the judge does not answer")

    outcome = simulate(simulated_config(run__batches=40), task=FakeTask(reward=reward))
    assert outcome.ending.code == 1
    assert "ConnectionError: the judge does not answer" in str(outcome.ending.error)
    assert clean(outcome)


def test_the_slow_poll_picks_up_a_put_whose_notice_is_lost_and_is_counted() -> None:
    """CASE-B11."""
    config = simulated_config(rollout__max_staleness=0, run__steps=3, data_plane__poll_s=5.0)

    def deaf(controller: Any) -> Any:
        hear = controller._listener._hear

        def hear_all_but_one(name: str, message: Any) -> None:
            if not (isinstance(message, PutNotice) and message.group.group == 1):
                hear(name, message)

        controller._listener._hear = hear_all_but_one
        return anyio.sleep(0)

    outcome = simulate(config, beside=deaf)
    assert outcome.ending.code == 0
    assert outcome.ledger.trained == 24
    assert [put.group for put in outcome.of(Put)].count(1) == 1
    assert outcome.controller.core.front_end.statistics().poll_hits == 1
    last = outcome.progress.last_step
    assert last is not None
    assert last.metrics["flow/slow_poll_hits"] == 1
    assert clean(outcome)


def test_without_lost_notices_the_slow_poll_has_no_hits() -> None:
    outcome = simulate(simulated_config(data_plane__poll_s=0.3), generators=[FakeGenerator(seconds=lambda call: 2.0)])
    assert outcome.controller.core.front_end.statistics().poll_hits == 0


def test_a_put_that_is_lost_does_not_make_the_run_wait_for_ever() -> None:
    """CASE-B11: the collector says put, the row is not there; the deadline tells."""

    class Loses(PassingPlane):
        puts = 0

        async def put(self, partition: str, group: Any, columns: Any) -> Any:
            self.puts += 1
            return await super().put(partition, group, columns) if self.puts != 2 else group

    config = simulated_config(rollout__max_staleness=0, supervision__starve_timeout_s=50.0)
    outcome = simulate(config, wrap=Loses)
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, Overdue)
    assert outcome.seconds < 60
    assert outcome.keys_left == []
    assert outcome.ledger.unsettled == []


def test_an_idle_trainer_gives_up_after_its_deadline_with_the_numbers() -> None:
    """CASE-B13: the collector lives and gives nothing."""
    config = simulated_config(
        supervision__starve_timeout_s=40.0, collector__group_timeout_s=1e6, rollout__max_staleness=2
    )
    outcome = simulate(config, generators=[FakeGenerator(seconds=lambda call: HANG_S)])
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, Overdue)
    for number in ("40 s", "6 in flight", "run-ahead 6/6", "trainer version 0", "published 0"):
        assert number in outcome.ending.reason
    assert outcome.seconds == 40.0
    assert outcome.audit.fates == dict.fromkeys(range(6), ["dropped:run_ended"] * 4)


def test_a_dead_collector_ends_a_waiting_trainer_with_the_collectors_error() -> None:
    """CASE-B13, CASE-B1: not the time-out of the claim."""

    class Dying(FakeGenerator):
        async def run(self) -> None:
            await anyio.sleep(3)
            raise OSError("out of memory")

    config = simulated_config(collector__group_timeout_s=1e6)
    outcome = simulate(config, generators=[Dying(seconds=lambda call: HANG_S)])
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, OSError)
    assert outcome.seconds < 5
    assert clean(outcome)


def test_groups_in_flight_at_the_end_leave_nothing_behind() -> None:
    """CASE-B22: two steps; two groups of the second wave never finish."""
    config = simulated_config(run__steps=2, rollout__max_staleness=2, collector__group_timeout_s=1e6)
    generator = FakeGenerator(seconds=lambda call: HANG_S if call >= 4 else 1.0)
    outcome = simulate(config, generators=[generator])
    assert (outcome.ending.code, outcome.progress.steps) == (0, 2)
    assert outcome.ledger.by_reason("dropped")["run_ended"] >= 8
    assert generator.running == 0
    assert outcome.seconds < 10
    assert clean(outcome)


@pytest.mark.parametrize("staleness", [0, 2])
def test_run_ahead_never_exceeds_its_limit_and_uses_all_of_it(staleness: int) -> None:
    """CASE-B16: the one limit, whatever waits where."""
    config = simulated_config(rollout__max_staleness=staleness, rollout__groups_per_step=3, run__steps=20)
    generator = FakeGenerator(seconds=lambda call: (0.1, 2.0, 9.0)[call % 3])
    outcome = simulate(config, generators=[generator])
    assert max(outcome.audit.run_ahead) == 3 * (staleness + 1)


def releases(outcome: Outcome) -> dict[int, int]:
    """Return by group how many batches were complete when its capacity came back."""
    done, out = 0, {}
    for event in outcome.events:
        if isinstance(event, BatchJudged):
            done += 1
        elif isinstance(event, Released):
            out.update(dict.fromkeys(event.groups, done))
    return out


def mixed(group: int, index: int) -> float:
    return float(index % 2) if group % 2 else 1.0


def test_with_refill_a_dropped_group_gives_its_capacity_back_before_its_batch_is_complete() -> None:
    """Section 2.7."""
    config = simulated_config(rollout__max_staleness=0, run__steps=1, filters=REFILL, rollout__groups_per_step=4)
    outcome = simulate(config, task=FakeTask.in_order(mixed))
    back = releases(outcome)
    assert {group: back[group] for group in (0, 2)} == {0: 0, 2: 0}
    assert all(back.get(group, 1) >= 1 for group in (1, 3))


def test_without_refill_all_groups_of_a_batch_come_back_together_when_its_version_is_published() -> None:
    """Section 2.7: a dropped group has used its place in the batch."""
    config = simulated_config(rollout__max_staleness=0, run__steps=2, rollout__groups_per_step=4)
    outcome = simulate(
        config, task=FakeTask.in_order(mixed), generators=[FakeGenerator(refuse=lambda version: 3.0 * version)]
    )
    first = outcome.of(Released)[0]
    assert sorted(first.groups) == [0, 1, 2, 3]
    published = next(e for e in outcome.events if type(e).__name__ == "Published" and getattr(e, "version", 0) == 1)
    assert first.seq == published.seq + 1
    assert first.t == 5.0


def test_a_batch_without_survivors_gives_its_capacity_back_at_once_and_is_no_step() -> None:
    """C8: V and the step counter stay, the next batch is trained."""
    task = FakeTask.in_order(lambda group, index: 0.0 if group < 4 else float(index % 2))
    outcome = simulate(simulated_config(rollout__max_staleness=0, run__steps=1), task=task)
    assert outcome.progress.batches == 3
    assert outcome.progress.steps == 1
    assert [event.version for event in outcome.of(StepStarted)] == [0]
    assert [event.groups for event in outcome.of(Released)][:2] == [[0, 1], [2, 3]]
    assert outcome.seconds == 4.0
    assert {event.tags["version"] for event in outcome.of(Put)} == {0}


def test_a_batch_whose_samples_have_no_tokens_to_train_is_no_step() -> None:
    """C8, D13: everything is masked; nothing reaches a rank, and capacity comes back."""
    config = simulated_config(run__steps=None, run__batches=3, rollout__max_staleness=0, trainer__micro_batch_tokens=3)
    generator = FakeGenerator(length=lambda call: 9 if call < 2 else 2)
    # A prompt of 2 tokens and a response of 2 are over the budget of 3 as well: no batch can be trained.
    outcome = simulate(config, generators=[generator])
    assert (outcome.ending.code, outcome.progress.steps) == (1, 0)
    assert outcome.ledger.by_reason("masked") == {"over_budget": 24}
    assert clean(outcome)


def test_claims_are_oldest_version_first_then_by_dispatch() -> None:
    config = simulated_config(rollout__max_staleness=2, run__steps=10)
    generator = FakeGenerator(seconds=lambda call: (3.0, 1.0, 2.0)[call % 3])
    outcome = simulate(config, generators=[generator])
    born = outcome.audit.born
    for event in outcome.of(Claimed):
        assert event.groups == sorted(event.groups, key=lambda group: (born[group], group))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_masks_its_sample_only(value: float) -> None:
    """C4: no NaN reaches the siblings."""
    task = FakeTask.in_order(lambda group, index: Reward(value) if (group, index) == (0, 1) else float(index % 3))
    outcome = simulate(simulated_config(run__steps=1, rollout__max_staleness=0), task=task)
    assert outcome.audit.fates[0] == ["trained", "masked:nan_reward", "trained", "trained"]
    assert clean(outcome)
