"""Models of durations, or of numbers of tokens: a name with parameters, as in `lognormal:1.0,0.5`."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from asyncrl.engine.errors import ConfigError

FORMS = "a number, or lognormal:mean,sigma, exponential:mean, uniform:low,high"


class Durations(Protocol):
    """Draws values of one kind."""

    @property
    def mean(self) -> float: ...

    def draw(self, rng: np.random.Generator) -> float: ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    @property
    def mean(self) -> float:
        return self.value

    def draw(self, rng: np.random.Generator) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`sigma` is the standard deviation of the logarithm; `mean` that of the values themselves."""

    mean: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma))


@dataclass(frozen=True, slots=True)
class Exponential:
    mean: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.exponential(self.mean))


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.low, self.high))


_MODELS: dict[str, tuple[int, type[Constant | LogNormal | Exponential | Uniform]]] = {
    "constant": (1, Constant),
    "lognormal": (2, LogNormal),
    "exponential": (1, Exponential),
    "uniform": (2, Uniform),
}


def parse_durations(text: str, option: str) -> Durations:
    """Parse a model; ConfigError, with the option's name, if it is not a model or has a negative number."""
    name, colon, rest = text.partition(":")
    if not colon:
        name, rest = "constant", text
    wanted = f"{option} is {text!r}; it must be {FORMS}"
    if name not in _MODELS:
        raise ConfigError(wanted)
    count, model = _MODELS[name]
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        raise ConfigError(wanted) from None
    if len(numbers) != count or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ConfigError(f"{wanted}, all of them finite and not negative")
    if name == "lognormal" and not numbers[0]:
        raise ConfigError(f"{wanted}, with a mean greater than 0")
    if name == "uniform" and numbers[0] > numbers[1]:
        raise ConfigError(f"{wanted}, with low at most high")
    return model(*numbers)
