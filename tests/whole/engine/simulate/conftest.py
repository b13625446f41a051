"""Small configurations, and a profile of constant times."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.collectors.tasks import load_task
from asyncrl.configs import RunConfig
from asyncrl.engine.simulate.durations import parse_durations
from asyncrl.engine.simulate.profile import Given
from asyncrl.engine.testing.simulation import simulated_config


@pytest.fixture
def given() -> Callable[..., Given]:
    """Make a profile: `given("lognormal:1,0.5", "2")` for groups and steps."""

    def make(group: str, step: str, publish: str = "0", **values: Any) -> Given:
        return Given(
            load_task("reverse", {}).prompts(),
            parse_durations(group, "--group-seconds"),
            parse_durations(step, "--step-seconds"),
            100,
            publish_seconds=parse_durations(publish, "--publish-seconds"),
            **values,
        )

    return make


@pytest.fixture
def small() -> Callable[..., RunConfig]:
    """Make a configuration of 4 groups a step, 30 steps."""

    def make(**values: Any) -> RunConfig:
        given = {"rollout__groups_per_step": 4, "run__steps": 30, "rollout__max_new_tokens": 100, **values}
        return simulated_config(**given)

    return make
