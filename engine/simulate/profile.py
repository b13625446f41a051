"""What the simulated parts do: how long groups, steps and publishes take, and what a group contains.

Every random number depends only on the seed and on its purpose (a group's seed, a step's number), so two configurations
of one sweep meet the same groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from asyncrl.engine.records import Prompt
from asyncrl.engine.simulate.durations import Constant, Durations


@dataclass(slots=True)
class Rollout:
    """The result of one group. A reward of None is a sample whose score fails; `tags` are per sample."""

    seconds: float
    response_tokens: Sequence[int]
    rewards: Sequence[float | None]
    failed: bool = False
    tags: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Burst:
    """The place of a group among those dispatched to one generator at one moment; `draw`, in [0, 1), is per burst."""

    number: int
    place: int
    draw: float


class Profile(Protocol):
    """Everything that a simulation knows about generation and training."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...

    @property
    def batched(self) -> bool:
        """Whether a generator decodes waiting groups in batches, first come first served, one batch after another."""

    def batch_seconds(self, rng: np.random.Generator, *, number: int, groups: int) -> float:
        """Draw the seconds of a generator's `number`-th decode batch; a group's own seconds come after it."""

    def prompt_tokens(self, prompt: int) -> int:
        """Return the tokens of a prompt, by its id."""

    def group(self, rng: np.random.Generator, *, prompt: int, version: int, size: int, burst: Burst) -> Rollout:
        """Draw a group that starts at `version`."""

    def step_seconds(self, rng: np.random.Generator, *, step: int, tokens_per_rank: float) -> float:
        """Draw the seconds of one training step."""

    def overhead(self, rng: np.random.Generator, kind: str, number: int) -> float:
        """Draw seconds of the `number`-th `publish`, `weights`, `hand_off`, `claim` or `judge`."""


def seeded(*parts: int) -> np.random.Generator:
    """Return a random generator that depends only on `parts`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([abs(part) for part in parts])))


_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Given:
    """A profile of given models. Without `response_tokens`, lengths are in proportion to a group's seconds.

    `mixed_share` of the groups have mixed rewards, the others equal ones; `failed_share` of the groups fail.
    """

    prompts: Sequence[Prompt]
    group_seconds: Durations
    step_seconds_model: Durations
    max_new_tokens: int
    response_tokens: Durations | None = None
    publish_seconds: Durations = field(default_factory=lambda: Constant(0.0))
    mixed_share: float = 1.0
    failed_share: float = 0.0

    @property
    def batched(self) -> bool:
        return False

    def batch_seconds(self, rng: np.random.Generator, *, number: int, groups: int) -> float:
        return 0.0

    def prompt_tokens(self, prompt: int) -> int:
        return _PROMPT_TOKENS

    def group(self, rng: np.random.Generator, *, prompt: int, version: int, size: int, burst: Burst) -> Rollout:
        seconds = self.group_seconds.draw(rng)
        failed, mixed = rng.random() < self.failed_share, rng.random() < self.mixed_share
        if self.response_tokens is None:
            mean = self.group_seconds.mean
            lengths = [self._fit(self.max_new_tokens / 4 * (seconds / mean if mean else 1.0))] * size
        else:
            lengths = [self._fit(self.response_tokens.draw(rng)) for _ in range(size)]
        return Rollout(seconds, lengths, [float(mixed and i % 2) for i in range(size)], bool(failed))

    def _fit(self, tokens: float) -> int:
        return min(self.max_new_tokens, max(1, round(tokens)))

    def step_seconds(self, rng: np.random.Generator, *, step: int, tokens_per_rank: float) -> float:
        return self.step_seconds_model.draw(rng)

    def overhead(self, rng: np.random.Generator, kind: str, number: int) -> float:
        return self.publish_seconds.draw(rng) if kind == "publish" else 0.0
