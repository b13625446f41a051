"""A fit from a recorded run: durations, failures and settings like those of the world it came from."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.configs import RunConfig, load
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.events.types import AnyEvent, Judged, RunStarted
from asyncrl.engine.simulate.fit import Fitted
from asyncrl.engine.simulate.profile import Given, seeded
from asyncrl.engine.simulate.run import predict
from asyncrl.engine.simulate.timeline import Timeline
from asyncrl.engine.testing.fakes import FakeGenerator, FakeTask
from asyncrl.engine.testing.simulation import Collected, simulate
from asyncrl.engine.trace.recording import Recording

Make = Callable[..., Given]
Small = Callable[..., RunConfig]


def started(config: RunConfig) -> RunStarted:
    return RunStarted(schema=2, config=config.model_dump(), software={})


def recorded(config: RunConfig, profile: Given) -> tuple[list[AnyEvent], dict[str, Any]]:
    collected = Collected()
    figures = predict(config, profile, folds=[collected]).figures
    return [started(config), *collected.events], figures


def test_a_generator_that_decodes_batches_is_seen_to_be_a_queue(small: Small) -> None:
    def run(seconds: Callable[[int], float]) -> list[AnyEvent]:
        config = small(rollout__max_staleness=2, run__steps=20, collector__engine="batch")
        outcome = simulate(config, generators=[FakeGenerator(seconds=seconds)], task=FakeTask(16))
        return [started(config), *outcome.events]

    assert Fitted(run(lambda call: 0.5)).batched
    assert not Fitted(run(lambda call: (0.2, 3.0, 1.0, 0.4)[call % 4])).batched


def test_a_batch_takes_what_batches_of_its_size_took_near_it(small: Small) -> None:
    """The first ones, in which code is compiled, say nothing of the last ones."""
    config = small(rollout__max_staleness=2, run__steps=40, collector__engine="batch")
    generator = FakeGenerator(seconds=lambda call: 0.5 if call < 60 else 0.25)
    fitted = Fitted([started(config), *simulate(config, generators=[generator], task=FakeTask(16)).events])
    assert fitted.batched
    rng = seeded(0)
    first, last = ({fitted.batch_seconds(rng, number=at, groups=4) for _ in range(50)} for at in (1, 40))
    assert (first, last) == ({0.5}, {0.25})


def test_a_slow_start_is_no_other_batchs(small: Small) -> None:
    """As where the first one compiles."""
    config = small(rollout__max_staleness=2, run__steps=40, collector__engine="batch")
    generator = FakeGenerator(seconds=lambda call: 9.0 if call < 12 else 0.25)
    fitted = Fitted([started(config), *simulate(config, generators=[generator], task=FakeTask(16)).events])
    rng = seeded(0)
    drawn = [{fitted.batch_seconds(rng, number=at, groups=12) for _ in range(50)} for at in (1, 2, 40)]
    assert drawn == [{9.0}, {0.25}, {0.25}]


def test_a_step_takes_what_steps_of_as_many_tokens_took_near_it(given: Make, small: Small) -> None:
    events, _ = recorded(small(), given("1", "uniform:1,2"))
    fitted = Fitted(events)
    rng = seeded(0)
    drawn = [fitted.step_seconds(rng, step=15, tokens_per_rank=1e9) for _ in range(50)]
    assert all(1 <= seconds <= 2 for seconds in drawn)
    assert len(set(drawn)) > 5


def test_a_long_start_without_a_group_to_train_is_left_by_the_groups_that_ended_it(small: Small) -> None:
    """All groups of a version count as near it, not its first 64: the prediction would stay at version 0 for ever."""

    def reward(number: int, index: int) -> float:
        return float(index % 2) if number >= 120 or number == 90 else 1.0

    config = small(rollout__max_staleness=0, run__steps=None, run__batches=60)
    task = FakeTask.in_order(reward, prompts=240)
    outcome = simulate(config, generators=[FakeGenerator(seconds=lambda call: 0.5)], task=task)
    waited = sum(event.age == 0 and event.dropped is not None for event in outcome.of(Judged))
    assert waited > 90
    figures = predict(config, Fitted([started(config), *outcome.events])).figures
    assert figures["steps"] > outcome.progress.steps / 2


def test_a_version_without_mixed_groups_near_it_is_left_too(small: Small) -> None:
    """Of the recorded groups of versions 1 and 2, all waited for one of an older version; another run has none."""

    def reward(number: int, index: int) -> float:
        return float(index % 2) if number < 12 or number >= 150 else 1.0

    config = small(rollout__max_staleness=2, run__steps=None, run__batches=60)
    task = FakeTask.in_order(reward, prompts=240)
    outcome = simulate(config, generators=[FakeGenerator(seconds=lambda call: 0.5)], task=task)
    asked = small(rollout__max_staleness=0, run__steps=None, run__batches=60)
    figures = predict(asked, Fitted([started(config), *outcome.events])).figures
    assert figures["steps"] > 5


def test_a_run_in_time_slices_cannot_be_fitted_and_can_be_predicted(given: Make, small: Small) -> None:
    """Of groups of 2 s and steps of 1 s, a cycle has both, as at staleness 0; apart it has the longer one."""
    events, apart = recorded(small(rollout__max_staleness=2), given("2", "1"))
    sliced = small(rollout__max_staleness=2, cluster__time_slicing="keep")
    figures = predict(sliced, Fitted(events)).figures
    assert apart["seconds_per_step"] == pytest.approx(1.0, abs=0.1)
    assert figures["seconds_per_step"] > 1.2
    assert figures["trainer_idle"] + figures["generators_idle"] > 0
    seen, _ = recorded(sliced, given("2", "1"))
    with pytest.raises(ConfigError, match="time_slicing 'keep', and its groups were asleep"):
        Fitted(seen)


def test_failures_are_drawn_as_often_as_they_were_seen(given: Make, small: Small) -> None:
    events, figures = recorded(small(run__steps=40), given("1", "1", failed_share=0.2))
    again = predict(small(run__steps=40, run__seed=3), Fitted(events)).figures
    assert again["lost"]["failed:generation_error"] == pytest.approx(
        figures["lost"]["failed:generation_error"], abs=0.08
    )


def test_the_recorded_configuration_comes_back_with_changes_on_top(small: Small) -> None:
    config = small(rollout__max_staleness=3, filters=[{"name": "zero_std"}])
    assert load("default", Recording([started(config)]).values("--from x")).config == config


def test_a_run_without_a_step_is_refused(small: Small) -> None:
    with pytest.raises(ConfigError, match="--from x has 0 groups and 0 steps"):
        Fitted([started(small())], source="--from x")


def test_figures_of_a_recorded_run_are_those_of_the_same_events(given: Make, small: Small) -> None:
    events, figures = recorded(small(), given("lognormal:1,1", "1"))
    again = Timeline()
    for event in events:
        again.apply(event)
    assert again.summary() == figures
