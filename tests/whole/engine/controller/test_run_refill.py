"""Filters in whole runs: refill and its attempts, drop-only, what the batch then holds."""

from typing import Any

import pytest
import structlog

from asyncrl.collectors.tasks import Reward
from asyncrl.configs import RunConfig
from asyncrl.engine.errors import RefillExhausted, TagError
from asyncrl.engine.events.types import BatchJudged, Judged, Planned, Released, Settled, StepStarted
from asyncrl.engine.testing.fakes import FakeTask
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config
from asyncrl.filters import BaseRolloutFilter, FilterContext, GroupView, Verdict, build_chain, drop, keep, mask
from asyncrl.filters.base import AFTER_LOGPROBS


def chain(**parameters: Any) -> list[dict[str, Any]]:
    return [{"name": "staleness"}, {"name": "zero_std"}, {"name": "dynamic_sampling", **parameters}]


def one_step(**parameters: Any) -> RunConfig:
    """Return a synchronous run of one step of 3 groups, with refill."""
    return simulated_config(
        rollout__groups_per_step=3, rollout__max_staleness=0, run__steps=1, filters=chain(**parameters)
    )


def flat_until(good: int) -> FakeTask:
    """Groups below `good` have equal rewards."""
    return FakeTask.in_order(lambda group, index: 1.0 if group < good else float(index % 2), prompts=200)


def pattern(kinds: str) -> FakeTask:
    """G: good, Z: zero spread, in order of dispatch."""
    return FakeTask.in_order(lambda group, index: float(index % 2) if kinds[group] == "G" else 1.0, prompts=len(kinds))


def clean(outcome: Outcome) -> bool:
    return outcome.keys_left == [] and outcome.ledger.unsettled == [] and outcome.audit.faults == []


@pytest.mark.parametrize("attempts", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 2])
def test_attempts_that_are_used_up_end_the_run_after_exactly_so_many_groups(attempts: int, staleness: int) -> None:
    """C1: groups_per_step 3, all flat; an attempt is 3 groups judged."""
    config = simulated_config(
        rollout__groups_per_step=3,
        rollout__max_staleness=staleness,
        filters=chain(max_attempts=attempts, on_exhausted="error"),
    )
    outcome = simulate(config, task=flat_until(1000))
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, RefillExhausted)
    assert len(outcome.of(Judged)) == 3 * attempts
    message = str(outcome.ending.error)
    assert f"{3 * attempts} groups judged in {attempts} attempts, 0 of 3 kept" in message
    assert f"'zero_std': {3 * attempts}" in message
    assert "max_attempts" in message
    assert "on_exhausted" in message
    assert outcome.progress.steps == 0
    assert outcome.ledger.by_reason("dropped")["zero_std"] == 12 * attempts
    assert clean(outcome)


def test_attempts_that_suffice_train_a_full_batch() -> None:
    """C1: with 3 good groups among the last of 6, limit 2 is not used up."""
    config = one_step(max_attempts=2)
    outcome = simulate(config, task=flat_until(3))
    assert outcome.ending.code == 0
    assert [event.groups for event in outcome.of(StepStarted)] == [[3, 4, 5]]
    [batch] = outcome.of(BatchJudged)
    assert (batch.judged, batch.kept, batch.attempts) == (6, 3, 2)


def test_train_partial_goes_on_with_what_was_kept() -> None:
    """C1: 6 judged, 2 kept of 3."""
    config = one_step(max_attempts=2, on_exhausted="train_partial")
    outcome = simulate(config, task=flat_until(4))
    assert outcome.ending.code == 0
    assert [event.groups for event in outcome.of(StepStarted)] == [[4, 5]]
    last = outcome.progress.last_step
    assert last is not None
    assert (last.metrics["batch/groups_kept"], last.metrics["batch/groups_judged"]) == (2, 6)


def test_train_partial_without_any_survivor_is_no_step_and_the_next_batch_is_used() -> None:
    """C1, C8."""
    config = one_step(max_attempts=2, on_exhausted="train_partial")
    outcome = simulate(config, task=flat_until(6))
    assert [event.kept for event in outcome.of(BatchJudged)] == [0, 3]
    assert [event.version for event in outcome.of(StepStarted)] == [0]
    assert clean(outcome)


def test_wait_goes_on_past_the_attempts_with_a_warning_at_each_further_one() -> None:
    """C1: 15 flat groups are five attempts; the budget is two."""
    config = one_step(max_attempts=2, on_exhausted="wait")
    with structlog.testing.capture_logs() as logs:
        outcome = simulate(config, task=flat_until(15))
    assert outcome.ending.code == 0
    assert outcome.progress.steps == 1
    assert len(outcome.of(Judged)) == 18
    warnings = [line["spent"] for line in logs if "past its attempts" in line["event"]]
    assert [spent.split(",")[0] for spent in warnings] == [
        f"{3 * n} groups judged in {n} attempts" for n in (2, 3, 4, 5)
    ]


@pytest.mark.parametrize(("refill", "pulled", "kept"), [(False, 4, 2), (True, 6, 4)])
def test_drop_only_pulls_a_batch_and_refill_pulls_until_it_is_full(refill: bool, pulled: int, kept: int) -> None:
    """C9: need 4, the stream is Z, G, Z, G, G, G."""
    config = simulated_config(
        rollout__groups_per_step=4,
        rollout__max_staleness=0,
        run__steps=1,
        task__epochs=1,
        filters=chain()[: None if refill else 2],
    )
    outcome = simulate(config, task=pattern("ZGZGGG"))
    batch = outcome.of(BatchJudged)[0]
    assert (batch.judged, batch.kept) == (pulled, kept)
    last = outcome.progress.last_step
    assert last is not None
    assert last.metrics["batch/groups_kept"] == kept
    assert last.samples == 4 * kept


def test_each_kind_of_failure_counts_under_its_own_reason() -> None:
    """C14: of six groups one fails, one is flat, one has a single survivor."""

    def reward(group: int, index: int) -> Reward | float:
        if group == 1 or (group == 2 and index > 0):
            raise ValueError("no score")
        return 1.0 if group == 0 else float(index % 2)

    config = one_step(max_attempts=3)
    outcome = simulate(config, task=FakeTask.in_order(reward))
    assert outcome.ending.code == 0
    assert outcome.ledger.by_reason("dropped") == {"few_live": 1, "zero_std": 4}
    assert outcome.ledger.by_reason("failed") == {"score_error": 7}
    assert outcome.of(StepStarted)[0].groups == [3, 4, 5]


def acc_task() -> FakeTask:
    return FakeTask(reward=lambda prompt, index: Reward(index / 10, {"acc": 0.0}))


@pytest.mark.parametrize(("tag", "dropped"), [("acc", "zero_std"), ("reward", None)])
def test_a_named_part_of_the_reward_is_what_the_filter_reads(tag: str, dropped: str | None) -> None:
    """C11: accuracy 0 for all, with shaped scores."""
    config = simulated_config(run__batches=2, run__steps=None, filters=[{"name": "zero_std", "tag": tag}])
    outcome = simulate(config, task=acc_task())
    assert {event.dropped for event in outcome.of(Judged)} == {dropped}


def test_a_tag_that_no_group_has_ends_the_run_with_filter_key_and_tag_and_loses_nothing() -> None:
    """C11, C12."""
    outcome = simulate(simulated_config(filters=[{"name": "zero_std", "tag": "acc"}]))
    assert outcome.ending.code == 1
    assert isinstance(outcome.ending.error, TagError)
    assert "filter zero_std needs tag 'acc', which v0_p0_g0 lacks" in outcome.ending.reason
    assert outcome.ledger.by_reason("dropped") == {"run_ended": outcome.ledger.dispatched}
    assert clean(outcome)


def test_a_group_whose_samples_all_failed_does_not_end_the_run_for_a_part_that_it_cannot_have() -> None:
    """C12: no reward, no parts; it is a failed group and no broken configuration."""

    def reward(group: int, index: int) -> Reward:
        if group == 0:
            raise ValueError("no score")
        return Reward(float(index % 2), {"acc": float(index % 2)})

    config = simulated_config(run__steps=2, filters=[{"name": "zero_std", "tag": "acc"}])
    outcome = simulate(config, task=FakeTask.in_order(reward))
    assert outcome.ending.code == 0
    assert outcome.audit.fates[0] == ["failed:score_error"] * 4
    assert outcome.progress.steps == 2


@pytest.mark.parametrize("refill", [True, False])
def test_with_refill_a_group_of_which_nothing_is_trained_gives_its_place_back_before_the_step(refill: bool) -> None:
    """Its samples are masked, all of them, so the batch is shorter; without refill it has used its place."""
    config = simulated_config(filters=chain(max_attempts=4)[-1:] if refill else [], run__steps=3)

    class MasksOdd(BaseRolloutFilter):
        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return mask(range(4), "odd", keep_reward=True) if group.group % 2 else keep()

    outcome = simulate(
        config, filters=[MasksOdd(), *build_chain(config.filters, min_live=2).filters], rank_seconds=lambda _: 50.0
    )
    assert outcome.ending.code == 0
    assert clean(outcome)
    began = {event.batch: outcome.events.index(event) for event in outcome.of(Planned)}
    released = {group: outcome.events.index(event) for event in outcome.of(Released) for group in event.groups}
    masked = [e for e in outcome.of(Judged) if e.group % 2 and e.batch in began and e.group in released]
    assert len(masked) >= 2
    assert {released[event.group] < began[event.batch] for event in masked} == {refill}


class Killer(BaseRolloutFilter):
    """The last stage: drops every group up to number `until`, or masks all its samples."""

    stage = AFTER_LOGPROBS

    def __init__(self, until: int = 1 << 30, masks: bool = False) -> None:
        self._until = until
        self._masks = masks

    @property
    def name(self) -> str:
        return "killer"

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        if group.group >= self._until:
            return keep()
        return mask(range(group.size), "all", keep_reward=True) if self._masks else drop("all")


def killed(killer: Killer, **parameters: Any) -> Outcome:
    config = simulated_config(rollout__groups_per_step=3, run__steps=2, run__batches=20, filters=chain(**parameters))
    staleness, zero_std, sampling = build_chain(config.filters, min_live=2).filters
    return simulate(config, filters=[staleness, zero_std, killer, sampling])


@pytest.mark.parametrize(("masks", "said"), [(False, "'killer/all': 9"), (True, "masked samples: {'killer/all': 36}")])
def test_attempts_are_used_up_by_groups_that_a_later_stage_takes_away(masks: bool, said: str) -> None:
    """FOUND-C17: all are kept at the claim and lost after log-probabilities; three attempts are nine groups."""
    outcome = killed(Killer(masks=masks), max_attempts=3)
    assert isinstance(outcome.ending.error, RefillExhausted)
    assert said in outcome.ending.reason
    assert "3 batches before had nothing left to train" in outcome.ending.reason
    assert outcome.progress.steps == 0
    # A batch that the front end had ready when the third was given up may have been judged as well.
    assert 9 <= len(outcome.of(Judged)) <= 12
    assert clean(outcome)


def test_a_batch_that_is_trained_gives_the_next_one_all_attempts_again() -> None:
    """FOUND-C17: two batches in vain, then one that is trained, with a budget of three attempts, and so on."""
    outcome = killed(Killer(until=6), max_attempts=3)
    assert outcome.ending.code == 0
    assert outcome.progress.steps == 2
    assert clean(outcome)


@pytest.mark.parametrize("refill", [True, False])
def test_a_group_dropped_after_log_probabilities_has_its_fate_before_the_step_and_its_place_back_with_refill(
    refill: bool,
) -> None:
    config = simulated_config(filters=chain(max_attempts=4)[-1:] if refill else [], run__steps=3)

    class DropsOdd(BaseRolloutFilter):
        stage = AFTER_LOGPROBS

        def judge(self, group: GroupView, context: FilterContext) -> Verdict:
            return drop("odd") if group.group % 2 else keep()

    outcome = simulate(
        config, filters=[DropsOdd(), *build_chain(config.filters, min_live=2).filters], rank_seconds=lambda _: 50.0
    )
    assert outcome.ending.code == 0
    assert clean(outcome)
    began = {event.batch: outcome.events.index(event) for event in outcome.of(Planned)}
    released = {group: outcome.events.index(event) for event in outcome.of(Released) for group in event.groups}
    settled = {event.group: event for event in outcome.of(Settled)}
    gone = [
        event for event in outcome.of(Judged) if event.group % 2 and event.batch in began and event.group in released
    ]
    assert len(gone) >= 2
    for judged in gone:
        fates = settled[judged.group]
        assert {fate.rpartition("/")[2] for fate in fates.fates} == {"odd"}
        assert outcome.events.index(fates) < began[judged.batch]
    assert {released[event.group] < began[event.batch] for event in gone} == {refill}
