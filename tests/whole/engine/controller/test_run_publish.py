"""Publishing in whole runs: failures, retries, the bound on publish lag."""

from collections.abc import Callable

import pytest

from asyncrl.engine.events.types import (
    Acknowledged,
    Published,
    PublishFailed,
    PublishStarted,
    Put,
    StepEnded,
    StepStarted,
)
from asyncrl.engine.testing.fakes import HANG_S, FakeGenerator
from asyncrl.engine.testing.simulation import Outcome, simulate, simulated_config


def refusing(*tries: int, hang: bool = False) -> FakeGenerator:
    """Make a generator whose n-th load (from 1; the first is version 0) fails for n in `tries`."""
    count = 0

    def refuse(version: int) -> float:
        nonlocal count
        count += 1
        if count in tries:
            if hang:
                return HANG_S
            raise OSError(f"load {count} failed")
        return 0.0

    return FakeGenerator(refuse=refuse)


def served_over_time(outcome: Outcome) -> list[tuple[float, int]]:
    return [(event.t, event.version) for event in outcome.of(Acknowledged)]


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_failed_publish_is_retried_and_changes_nothing_until_it_succeeds(hang: bool, staleness: int) -> None:
    """CASE-A6, invariant 8: version 1 fails twice, then loads."""
    generator = refusing(2, 3, hang=hang)
    config = simulated_config(rollout__max_staleness=staleness, run__steps=4, trainer__publish_timeout_s=10.0)
    outcome = simulate(config, generators=[generator])
    assert outcome.ending.code == 0
    failures = outcome.of(PublishFailed)
    assert [failure.version for failure in failures] == [1, 1]
    assert generator.updates[:4] == [0, 1, 1, 1]
    first_new = next(event for event in outcome.of(Acknowledged) if event.version == 1)
    assert first_new.seq > failures[-1].seq
    early = [event for event in outcome.of(Put) if event.seq < first_new.seq]
    assert {event.tags["version"] for event in early} == {0}
    assert [event.version for event in outcome.of(Published)] == sorted({e.version for e in outcome.of(Published)})
    assert outcome.audit.faults == []
    assert max(outcome.audit.lags) <= config.max_publish_lag


@pytest.mark.parametrize("tries", [1, 3])
def test_a_publish_that_fails_every_time_ends_the_run_with_its_error(tries: int) -> None:
    """CASE-A6."""
    generator = refusing(*range(2, 99))
    config = simulated_config(trainer__publish_tries=tries, run__steps=9)
    outcome = simulate(config, generators=[generator])
    assert outcome.ending.code == 1
    assert outcome.ending.reason == f"OSError: load {1 + tries} failed"
    assert len(outcome.of(PublishFailed)) == tries
    assert outcome.controller.core.versions.published == 0
    assert {event.tags["version"] for event in outcome.of(Put)} == {0}
    assert outcome.keys_left == []
    assert outcome.audit.faults == []


def test_version_zero_must_be_served_before_anything_is_granted() -> None:
    outcome = simulate(simulated_config(), generators=[FakeGenerator(refuse=lambda version: 7.0 if not version else 0)])
    kinds = [type(event).__name__ for event in outcome.events]
    assert kinds.index("Dispatched") > kinds.index("Published")
    assert outcome.events[kinds.index("Dispatched")].t == 7.0


def test_only_the_generators_that_failed_are_asked_again() -> None:
    good, bad = FakeGenerator(), refusing(2)
    outcome = simulate(simulated_config(collector__count=2, run__steps=3), generators=[good, bad])
    assert outcome.ending.code == 0
    assert good.updates.count(1) == 1
    assert bad.updates.count(1) == 2


def slow(seconds: float) -> Callable[[int], float]:
    return lambda version: seconds if version else 0.0


@pytest.mark.parametrize(
    ("staleness", "lag", "bound"), [(0, None, 0), (1, None, 1), (2, None, 1), (2, 0, 0), (2, 2, 2), (3, 2, 2)]
)
def test_no_step_starts_while_the_publish_lag_is_over_its_bound(staleness: int, lag: int | None, bound: int) -> None:
    """The publish takes five steps' time, so the bound is reached; it is never passed."""
    config = simulated_config(rollout__max_staleness=staleness, rollout__max_publish_lag=lag, run__steps=15)
    outcome = simulate(config, generators=[FakeGenerator(refuse=slow(5.0)), FakeGenerator(refuse=slow(2.0))])
    assert outcome.ending.code == 0
    assert max(outcome.audit.lags) == bound
    assert outcome.audit.faults == []


def test_at_lag_zero_a_step_begins_only_after_the_last_version_is_published() -> None:
    config = simulated_config(rollout__max_staleness=0, run__steps=4)
    outcome = simulate(config, generators=[FakeGenerator(refuse=slow(3.0))])
    published = {event.version: event.seq for event in outcome.of(Published)}
    for event in outcome.of(StepStarted):
        assert published[event.version] < event.seq


def test_at_lag_one_a_publish_overlaps_one_step() -> None:
    config = simulated_config(rollout__max_staleness=2, run__steps=6)
    outcome = simulate(config, generators=[FakeGenerator(refuse=slow(1.0))])
    published = {event.version: event.t for event in outcome.of(Published)}
    began = {event.version: event.t for event in outcome.of(StepStarted)}
    assert any(began[version] < published[version] for version in began if version in published and version)


def test_versions_are_published_one_by_one_and_never_go_backwards() -> None:
    config = simulated_config(rollout__max_staleness=3, rollout__max_publish_lag=3, run__steps=12)
    outcome = simulate(config, generators=[FakeGenerator(refuse=slow(2.5))])
    versions = [version for _, version in served_over_time(outcome)]
    assert versions == list(range(len(versions)))
    assert [event.version for event in outcome.of(PublishStarted)] == list(range(len(outcome.of(PublishStarted))))


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_lag_metric_is_that_under_which_the_step_was_allowed(staleness: int) -> None:
    """It must never show more than the bound that the user set."""
    config = simulated_config(rollout__max_staleness=staleness, run__steps=8)
    outcome = simulate(config, generators=[FakeGenerator(refuse=slow(5.0))])
    shown = [int(event.metrics["staleness/publish_lag_versions"]) for event in outcome.of(StepEnded)]
    assert shown == outcome.audit.lags
