"""Models of durations: what they draw, and what is no model."""

import math

import pytest

from asyncrl.engine.errors import ConfigError
from asyncrl.engine.simulate.durations import parse_durations
from asyncrl.engine.simulate.profile import seeded


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("1.5", 1.5, 0.0),
        ("constant:0", 0.0, 0.0),
        ("exponential:2", 2.0, 2.0),
        ("uniform:1,3", 2.0, 2 / math.sqrt(12)),
        # Of a log-normal of mean m the variance is m² (exp(σ²) - 1).
        ("lognormal:2,0.5", 2.0, 2 * math.sqrt(math.exp(0.25) - 1)),
    ],
)
def test_a_model_draws_its_mean_and_spread(text: str, mean: float, deviation: float) -> None:
    model, rng = parse_durations(text, "--x"), seeded(1)
    drawn = [model.draw(rng) for _ in range(20_000)]
    average = sum(drawn) / len(drawn)
    assert model.mean == pytest.approx(mean)
    assert average == pytest.approx(mean, rel=0.03)
    assert math.sqrt(sum((x - average) ** 2 for x in drawn) / len(drawn)) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "normal:1", "lognormal:1", "uniform:3,1", "uniform:1", "-1", "nan", "inf", "lognormal:0,1", "1,2"],
)
def test_what_is_no_model_is_refused_with_the_option_and_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--group-seconds is .*lognormal:mean,sigma"):
        parse_durations(text, "--group-seconds")


def test_a_draw_is_a_function_of_its_seed_alone() -> None:
    model = parse_durations("lognormal:1,1", "--x")
    assert model.draw(seeded(1, 2)) == model.draw(seeded(1, 2)) != model.draw(seeded(1, 3))
