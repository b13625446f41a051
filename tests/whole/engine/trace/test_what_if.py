"""What-if: the recorded claims under another configuration, next to what was."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncrl.configs import Override
from asyncrl.engine.errors import ConfigError, TraceError
from asyncrl.engine.events.types import Judged, Settled, StepEnded
from asyncrl.engine.testing.trace import play, put, version
from asyncrl.engine.trace.recording import Recording
from asyncrl.engine.trace.report import side_by_side
from asyncrl.engine.trace.what_if import Answer, what_if
from asyncrl.filters import BaseRolloutFilter, Chain, FilterContext, GroupView, Verdict, drop, keep

Record = Callable[..., Recording]


def asked(recording: Recording, added: Sequence[str] = (), **settings: Any) -> Answer:
    overrides = [Override(name.replace("__", "."), value, name) for name, value in settings.items()]
    return what_if(recording, recording.config(overrides, added))


def changes(answer: Answer) -> dict[str, tuple[str, str]]:
    rows = side_by_side(answer.before, answer.after)
    return {name: (before, after) for name, before, after in rows if before != after}


@pytest.mark.parametrize("settings", [{}, {"rollout__max_staleness": 0}, {"task__epochs": 1, "run__steps": None}])
def test_the_recorded_configuration_gives_what_was(record: Record, settings: dict[str, Any]) -> None:
    recording = record(**settings)
    answer = asked(recording)
    assert changes(answer) == {}
    was = {e.group: e.fates for e in recording.events if isinstance(e, Settled)}
    assert {e.group: e.fates for e in answer.events if isinstance(e, Settled)} == was


def test_a_run_with_oversampling_can_be_asked_about_a_bound_of_0(record: Record) -> None:
    recording = record(rollout__oversample=2)
    assert "groups dropped: stale" in changes(asked(recording, rollout__max_staleness=0))


def test_every_figure_of_a_stricter_bound_by_hand() -> None:
    """Ages 0, 1 and 2, and a flat group of age 2: under a bound of 1, the last two are stale, before any filter."""
    played = play(
        [
            version(2),
            put([0, 1], version=2, lengths=[5, 7]),
            put([0, 1], version=2, lengths=[1, 1]),
            put([0, 1], version=2, lengths=[10, 20]),
            put([1, 1], version=3, lengths=[3, 3]),
        ],
        max_staleness=2,
    )
    assert played.verdicts == {0: None, 1: None, 2: None, 3: "zero_std"}
    answer = asked(Recording(played.events), rollout__max_staleness=1)
    assert changes(answer) == {
        "steps": ("3", "2"),
        "groups kept": ("3", "2"),
        "groups dropped: stale": ("0", "2"),
        "groups dropped: zero_std": ("1", "0"),
        "samples trained": ("6", "4"),
        "samples dropped: stale": ("0", "4"),
        "samples dropped: zero_std": ("2", "0"),
        "trained at age 2": ("2", "0"),
        "mean trained age (versions)": ("1", "0.5"),
        "tokens trained": ("44", "14"),
        "tokens wasted": ("6", "36"),
        "tokens wasted, dropped:stale": ("0", "36"),
        "tokens wasted, dropped:zero_std": ("6", "0"),
        "mean length trained (tokens)": ("7.333", "3.5"),
        "length kept by age (1 is fair)": ("1", "0.56"),
    }


def test_without_filters_what_they_dropped_is_trained(record: Record) -> None:
    recording = record()
    answer = asked(recording)
    flat = answer.before.dropped["zero_std"]
    assert flat > 0
    free = asked(recording, filters=[])
    assert free.after.dropped["zero_std"] == 0
    verdicts = [event for event in free.events if isinstance(event, Judged)]
    assert sum(event.dropped is None for event in verdicts) >= sum(
        isinstance(event, Judged) and event.dropped is None for event in recording.events
    )


def test_a_loss_that_uses_log_probabilities_does_not_keep_other_filters_from_being_asked(record: Record) -> None:
    """Decoupled PPO measures what it trains: of groups that it would train now and did not then, nothing is known."""
    for settings in ({"trainer__recompute_logprobs": True}, {"trainer__updates_per_batch": 2}):
        # To the end of the data, so that each batch that was judged was trained.
        recording = record(run__steps=None, task__epochs=1, **settings)
        assert changes(asked(recording)) == {}
        free = asked(recording, filters=[])
        assert free.after.ledger.trained > free.before.ledger.trained
        with pytest.raises(TraceError, match="a filter judges by log-probabilities"):
            asked(recording, filters=[{"name": "importance_outliers"}])


def test_refill_makes_other_batches_of_the_same_claims(record: Record) -> None:
    recording = record()
    refill = [{"name": "zero_std"}, {"name": "dynamic_sampling", "max_attempts": 8}]
    answer = asked(recording, filters=refill)
    steps = [event for event in answer.events if isinstance(event, StepEnded)]
    assert 0 < len(steps) < answer.before.progress.steps
    order = [event.group for event in recording.events if isinstance(event, Judged)]
    assert [event.group for event in answer.events if isinstance(event, Judged)] == order[: answer.after.judged]


def test_refill_that_would_have_been_exhausted_is_said(record: Record) -> None:
    played = play([put([1, 1]) for _ in range(8)], groups_per_step=2)
    answer = asked(
        Recording(played.events), filters=[{"name": "zero_std"}, {"name": "dynamic_sampling", "max_attempts": 2}]
    )
    assert "used up its 2 attempts" in answer.note
    assert answer.after.ledger.balanced
    assert answer.after.ledger.unsettled == []


def test_an_added_filter_goes_to_the_end_of_the_chain_and_conserves_samples(record: Record) -> None:
    recording = record()
    answer = asked(recording, ["truncated"])
    assert answer.after.ledger.dispatched == answer.before.ledger.dispatched
    assert answer.after.ledger.unsettled == []


def test_what_cannot_be_asked_is_refused(record: Record) -> None:
    recording = record()
    with pytest.raises(TraceError, match="group_size is 8, and the recorded groups have 4"):
        asked(recording, rollout__group_size=8)
    with pytest.raises(ConfigError, match="max_stalenes"):
        asked(recording, rollout__max_stalenes=1)
    with pytest.raises(TraceError, match="measured none"):
        asked(recording, filters=[{"name": "importance_outliers"}])


class Ancient(BaseRolloutFilter):
    """Drops groups that are a version old, for a reason that it declares to be about age."""

    drop_reasons = age_reasons = ("ancient",)

    def judge(self, group: GroupView, context: FilterContext) -> Verdict:
        return drop("ancient") if group.meta.age(context.trainer_version) else keep()


def test_what_a_filter_of_ones_own_drops_for_age_is_lost_to_age_before_and_after(record: Record) -> None:
    recording = record(chain=[Ancient()])
    answer = what_if(recording, recording.config(), chain=Chain([Ancient()]))
    assert answer.before.dropped["Ancient/ancient"] > 0
    for report in (answer.before, answer.after):
        bias = report.progress.length_bias
        aged = bias.wasted_tokens["dropped:Ancient/ancient"] + bias.wasted_tokens["dropped:stale"]
        assert bias.lost_tokens == aged
