"""A fit of a long run: it predicts runs at other bounds like the world it came from."""

import pytest

from asyncrl.collectors.tasks import load_task
from asyncrl.configs import RunConfig
from asyncrl.engine.events.types import RunStarted
from asyncrl.engine.simulate.durations import parse_durations
from asyncrl.engine.simulate.fit import Fitted
from asyncrl.engine.simulate.profile import Given
from asyncrl.engine.simulate.run import predict
from asyncrl.engine.testing.simulation import Collected, simulated_config

WORLD = Given(
    load_task("reverse", {}).prompts(),
    parse_durations("lognormal:1,0.5", "--group-seconds"),
    parse_durations("uniform:0.5,0.7", "--step-seconds"),
    100,
    publish_seconds=parse_durations("0.1", "--publish-seconds"),
    mixed_share=0.8,
)


def at(staleness: int, seed: int) -> RunConfig:
    return simulated_config(
        rollout__max_staleness=staleness,
        rollout__groups_per_step=4,
        rollout__max_new_tokens=100,
        run__steps=150,
        run__seed=seed,
    )


@pytest.mark.long
def test_fitted_at_one_bound_it_predicts_others() -> None:
    """The world is one of known durations; the fit sees its events at bound 2 alone."""
    config, seen = at(2, 0), Collected()
    predict(config, WORLD, folds=[seen])
    fitted = Fitted([RunStarted(schema=2, config=config.model_dump(), software={}), *seen.events])
    for staleness in (0, 1, 4):
        other = at(staleness, 7)
        truth, guess = predict(other, WORLD).figures, predict(other, fitted).figures
        for name in ("mean_age", "trained_share", "step_seconds", "seconds_per_step"):
            assert guess[name] == pytest.approx(truth[name], rel=0.1, abs=0.02), (name, staleness)
