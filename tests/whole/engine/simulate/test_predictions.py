"""What a simulation predicts, against what can be worked out by hand; one seed, one result."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest

from asyncrl.configs import RunConfig
from asyncrl.engine.events.types import StepEnded
from asyncrl.engine.simulate.profile import Given
from asyncrl.engine.simulate.run import predict
from asyncrl.engine.testing.simulation import Collected

Make = Callable[..., Given]
Small = Callable[..., RunConfig]


def test_at_staleness_zero_a_cycle_is_group_plus_step_plus_publish(given: Make, small: Small) -> None:
    figures = predict(small(rollout__max_staleness=0), given("3", "2", "0.5")).figures
    # 30 steps, and 29 publishes between them.
    assert figures["seconds"] == pytest.approx(30 * 5 + 29 * 0.5)
    assert figures["mean_age"] == 0
    assert figures["trainer_idle"] == pytest.approx(1 - 60 / 164.5, abs=1e-4)
    assert figures["generators_idle"] == pytest.approx(1 - 90 / 164.5, abs=1e-4)
    assert figures["step_seconds"] == 2.0
    assert figures["groups_per_second"] == pytest.approx(120 / 164.5, rel=1e-4)


def test_a_slow_trainer_is_never_idle_and_everything_gets_as_old_as_the_bound(given: Make, small: Small) -> None:
    figures = predict(small(rollout__max_staleness=2), given("0.5", "2")).figures
    assert figures["trainer_idle"] == pytest.approx(0.5 / 60.5, abs=1e-3)
    assert set(figures["ages"]) == {"0", "1", "2"}
    # The first two batches are younger: all three of version 0 are ready at once.
    assert figures["ages"]["0"] == figures["ages"]["1"] == 16
    assert figures["buffer_max"] == 12


def test_slow_generators_leave_the_trainer_idle_and_slots_make_them_slower(given: Make, small: Small) -> None:
    config, profile = small(rollout__max_staleness=1), given("1", "0.1")
    free = predict(config, profile).figures
    tight = predict(config, profile, slots=2).figures
    # Two at a time: four groups take two seconds.
    assert tight["seconds_per_step"] == pytest.approx(2.0, rel=0.05)
    assert free["seconds_per_step"] < 1.2
    assert tight["generators_idle"] < 0.05


class Batched(Given):
    """Decodes whatever waits in one second."""

    @property
    def batched(self) -> bool:
        return True

    def batch_seconds(self, rng: np.random.Generator, *, number: int, groups: int) -> float:
        return 1.0


@pytest.mark.parametrize(("engine", "cycle"), [("native", 1.0), ("batch", 1.25)])
def test_weights_load_beside_a_decode_batch_or_between_two(
    given: Make, small: Small, engine: str, cycle: float
) -> None:
    """An engine that decodes on while weights load is not held up by a publish."""
    profile = Batched(**{item.name: getattr(given("0", "0.1", "0.25"), item.name) for item in fields(Given)})
    config = small(rollout__max_staleness=2, collector__engine=engine, collector__decode_samples=16)
    collected = Collected()
    predict(config, profile, folds=[collected])
    ends = [event.t for event in collected.events if isinstance(event, StepEnded)][10:]
    assert (ends[-1] - ends[0]) / (len(ends) - 1) == pytest.approx(cycle, rel=0.05)


def test_more_generators_with_slots_generate_more(given: Make, small: Small) -> None:
    profile = given("1", "0.01")
    one, four = (predict(small(rollout__max_staleness=4, collector__count=n), profile, slots=1).figures for n in (1, 4))
    assert four["groups_per_second"] == pytest.approx(4 * one["groups_per_second"], rel=0.15)


def test_dropping_what_is_stale_shortens_what_is_trained(given: Make, small: Small) -> None:
    figures = predict(
        small(rollout__max_staleness=1, run__steps=40, rollout__groups_per_step=8), given("lognormal:1,1", "0.3")
    ).figures
    assert figures["length_ratio"] < 0.9
    assert figures["lost"]["dropped:stale"] > 0.05
    assert figures["wasted_tokens"]["dropped:stale"] > 0


def test_shares_of_equal_rewards_and_failures_are_lost_by_cause(given: Make, small: Small) -> None:
    profile = given("1", "1", mixed_share=0.5, failed_share=0.1)
    figures = predict(small(run__steps=None, run__batches=40), profile).figures
    assert figures["lost"]["failed:generation_error"] == pytest.approx(0.1, abs=0.06)
    assert figures["lost"]["dropped:zero_std"] == pytest.approx(0.45, abs=0.1)
    assert figures["trained_share"] == pytest.approx(1 - sum(figures["lost"].values()), abs=1e-3)


def test_in_mode_tokens_old_tokens_are_withheld_and_nothing_is_dropped_for_age(given: Make, small: Small) -> None:
    config = small(rollout__max_staleness=1, rollout__stale_mode="tokens", run__steps=30)
    figures = predict(config, given("lognormal:1,1", "0.3")).figures
    assert "dropped:stale" not in figures["lost"]
    assert set(figures["ages"]) <= {"0", "1"}


def test_one_seed_gives_one_sequence_of_events_and_another_seed_another(given: Make, small: Small) -> None:
    def run(seed: int) -> list[str]:
        collected = Collected()
        predict(
            small(run__seed=seed, run__steps=10, collector__count=2),
            given("lognormal:1,1", "1", "0.2"),
            folds=[collected],
        )
        return [str(event) for event in collected.events]

    first = run(1)
    assert run(1) == first
    assert run(2) != first
